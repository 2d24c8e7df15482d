"""Recognise known transforms in the difference of two tensors."""

from collections.abc import Iterator

import numpy as np

from dflash_jax.converters.names.gguf import half_split_rows
from dflash_jax.converters.source import as_rows

MAX_WEIGHTS = 1 << 26


def guess(first: np.ndarray, second: np.ndarray, head_dim: int, limit: float) -> str:
    """Return the transform that makes the tensors equal within `limit` relative RMS, or ""."""
    if first.size > MAX_WEIGHTS:
        return ""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norm = float(np.linalg.norm(a)) or 1.0
    for name, changed in _candidates(a, b, head_dim):
        if np.linalg.norm(a - changed) / norm <= limit:
            return name
    return ""


def _candidates(a: np.ndarray, b: np.ndarray, head_dim: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "the second has 1 added", b - 1
    yield "the second lacks 1", b + 1
    yield "the sign is turned", -b
    if b.ndim == 2 and b.shape[0] == b.shape[1]:
        yield "the second is transposed", b.T
    rows = as_rows(b)
    if len(rows) % head_dim == 0:
        order = half_split_rows(len(rows) // head_dim, head_dim)
        yield "the second pairs neighbours for rotation", rows[order].reshape(b.shape)
        yield "the first pairs neighbours for rotation", rows[np.argsort(order)].reshape(b.shape)
    power = float(np.vdot(b, b))
    if power:
        factor = float(np.vdot(a, b)) / power
        yield f"the first is the second times {factor:.6g}", b * factor
