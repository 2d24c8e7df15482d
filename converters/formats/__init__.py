"""Tensors, their names and their encodings in files, which families build on.

Nothing here knows a family, or how models are read and written.
"""
