"""Quantised weights: their formats, their memory layouts, and products with them."""
