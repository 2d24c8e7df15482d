"""The 32-weight block formats. Each decoder fills `out` [N, 32] from blocks [N, bytes]."""

from collections.abc import Sequence

import numpy as np


def q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * q, q a signed byte."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= half(blocks, 0)


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (q - 8)."""
    codes = interleave(nibbles(blocks[:, 2:]), 16)
    codes -= 8
    out.reshape(-1)[...] = codes.view(np.int8)
    out *= half(blocks, 0)


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * q + m."""
    out.reshape(-1)[...] = interleave(nibbles(blocks[:, 4:]), 16)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (q - 16); the fifth bits are stored separately."""
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    codes -= 16
    out.reshape(-1)[...] = codes.view(np.int8)
    out *= half(blocks, 0)


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * q + m; the fifth bits are stored separately."""
    out.reshape(-1)[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high four bits of bytes, contiguous."""
    if packed.shape[-1] < 64:  # short rows cost more than the copy
        packed = np.ascontiguousarray(packed)
    return packed & 15, packed >> 4


def interleave(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Bytes taken in turn from each part, `width` at a time: flat, in the parts' dtype."""
    record = np.dtype((np.void, width))  # moved as one unit, which is much faster than byte by byte
    out = np.empty((parts[0].size // width, len(parts)), record)
    for i, part in enumerate(parts):
        out[:, i] = part.reshape(-1).view(record)
    return out.view(parts[0].dtype).reshape(-1)


def _five_bits(high: np.ndarray, packed: np.ndarray) -> np.ndarray:
    codes = interleave(nibbles(packed), 16)
    bits = np.unpackbits(np.ascontiguousarray(high).reshape(-1), bitorder="little")
    bits <<= 4
    codes |= bits
    return codes
