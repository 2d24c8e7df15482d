"""Drafters for SmolLM2-135M-Instruct, trained from no data set."""
