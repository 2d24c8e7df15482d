"""Pieces of texts as documents."""

from collections.abc import Iterator

import numpy as np

from dflash_jax.train.rows import Document


def pieces(ids: np.ndarray, length: int) -> Iterator[Document]:
    """Yield consecutive pieces of token ids; a last one shorter than a quarter is dropped."""
    for start in range(0, len(ids), length):
        part = ids[start : start + length]
        if len(part) * 4 >= length:
            yield Document(part, np.ones(len(part), bool))
