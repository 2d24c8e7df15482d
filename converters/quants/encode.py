"""Encode weights in ggml's 32-weight block formats, to the same bits as its reference code.

The arithmetic is that of `quantize_row_*_ref` in ggml-quants.c, without an importance matrix, and
with every operation rounded to float32: a compiler that fuses products and sums may choose the
neighbouring code for a weight halfway between two.
"""

from collections.abc import Callable

import numpy as np

from dflash_jax.converters.quants.types import GgmlType

Encoder = Callable[[np.ndarray], tuple[np.ndarray, ...]]
CHUNK = 1 << 16  # weights encoded at a time, so that temporaries stay in cache


def encode(kind: GgmlType, rows: np.ndarray) -> np.ndarray:
    """Return rows of weights as blocks, uint8 [rows, bytes of a row].

    Args:
      rows: float32 [rows, columns], finite; columns are a multiple of the block size.

    Raises:
      OverflowError: a scale is outside float16.
    """
    encoder = ENCODERS[kind.name]
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, kind.block_size)
    out = np.empty((len(blocks), kind.block_bytes), np.uint8)
    step = max(1, CHUNK // kind.block_size)
    for start in range(0, len(blocks), step):
        at = 0
        for part in encoder(blocks[start : start + step]):
            raw = part.view(np.uint8)
            out[start : start + step, at : at + raw.shape[1]] = raw
            at += raw.shape[1]
    return out.reshape(len(rows), -1)


def q8_0(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the scale and signed codes, rounded half away from zero as by C's roundf."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += size - whole >= np.float32(0.5)
    return _half(scale), np.copysign(whole, scaled).astype(np.int8)


def q4_0(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the scale and codes; the weight of largest magnitude has the code 0."""
    first = np.abs(x).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(x, first, axis=1) / np.float32(-8)
    return _half(scale), _nibbles(x * _inverse(scale) + np.float32(8.5))


def q4_1(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the scale, the least weight, and codes relative to it."""
    least = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - least) / np.float32(15)
    codes = (x - least) * _inverse(scale) + np.float32(0.5)
    return _half(scale), _half(least), _nibbles(codes)


ENCODERS: dict[str, Encoder] = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1}


def _inverse(scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale, or 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(1) / scale
    return np.where(np.isfinite(found), found, np.float32(0))


def _half(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = values.astype("<f2")
    if not np.isfinite(found).all():
        raise OverflowError(float(np.abs(values).max()))
    return found


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return codes truncated to 0..15, the first half of a block in the low four bits."""
    whole = np.minimum(codes.astype(np.int8).view(np.uint8), 15)
    half = whole.shape[1] // 2
    return whole[:, :half] | whole[:, half:] << 4
