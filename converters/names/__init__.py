"""Tensor names: parameters and what fills them, and the spellings of layouts and formats."""
