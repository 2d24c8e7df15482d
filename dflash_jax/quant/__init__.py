"""Weights of a few bits each: how they lie in memory (`layouts`), and products with them."""
