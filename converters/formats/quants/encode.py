"""Encode weights in ggml's block formats."""

from collections.abc import Callable

import numpy as np

from dflash_jax.converters.formats.quants import encoders
from dflash_jax.converters.formats.quants.types import BY_NAME, GgmlType

Encoder = Callable[[np.ndarray, np.ndarray | None], tuple[np.ndarray, ...]]
CHUNK = 1 << 15  # weights encoded at a time, so that temporaries stay in cache
# Largest weight: scales of any type but MXFP4 reach to less, and squares of larger ones overflow.
LARGEST = 1e9
# An encoder is the function of its type's name in lower case.
ENCODERS: dict[str, Encoder] = {
    name: encoder for name in BY_NAME if (encoder := getattr(encoders, name.lower(), None))
}


def encode(kind: GgmlType, rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Return rows of weights as blocks, uint8 [rows, bytes of a row].

    Args:
      rows: float32 [rows, columns], finite; columns are a multiple of the block size.
      importance: how much the error of each weight counts, as `rows`; None for no difference.

    Raises:
      OverflowError: a weight is too large for the type's scales.
    """
    if np.abs(rows).max(initial=0) > LARGEST:
        raise OverflowError
    encoder = ENCODERS[kind.name]
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, kind.block_size)
    factors = None if importance is None else importance.reshape(blocks.shape)
    out = np.empty((len(blocks), kind.block_bytes), np.uint8)
    step = max(1, CHUNK // kind.block_size)
    for start in range(0, len(blocks), step):
        chosen = slice(start, start + step)
        at = 0
        for part in encoder(blocks[chosen], None if factors is None else factors[chosen]):
            raw = part.view(np.uint8)
            out[chosen, at : at + raw.shape[1]] = raw
            at += raw.shape[1]
    return out.reshape(len(rows), -1)
