"""Spellings of tensors and configurations in the layouts of other programs."""
