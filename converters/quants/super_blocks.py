"""The 256-weight formats. Each decoder fills `out` [N, 256] from blocks [N, bytes].

A run is 32 consecutive weights; a half is four runs.
"""

import numpy as np

from dflash_jax.converters.quants.legacy import half, interleave, nibbles

# The low bits of each byte of a word.
LOW_2, LOW_4, LOW_6 = np.uint32(0x03030303), np.uint32(0x0F0F0F0F), np.uint32(0x3F3F3F3F)


def q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * sc * q - dmin * mn, a scale byte (sc low, mn high) for every 16 weights."""
    scale, offset = nibbles(blocks[:, :16])
    out.reshape(-1)[...] = _two_bits(blocks[:, 16:80])
    _scale(out, half(blocks, 80) * scale.astype(np.float32))
    _shift(out, half(blocks, 82) * offset.astype(np.float32))


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (sc - 32) * q; the third bit is stored separately, inverted."""
    codes = _two_bits(blocks[:, 32:96])
    codes -= 4
    codes += interleave(_bit_planes(blocks[:, :32], 2), 32)
    out.reshape(-1)[...] = codes.view(np.int8)
    low, high, top = _words(blocks[:, 96:108])
    parts = [low, high, low >> 4, high >> 4]
    words = [part & LOW_4 | (top >> 2 * k & LOW_2) << 4 for k, part in enumerate(parts)]
    scale = _bytes(words)
    scale -= 32
    _scale(out, half(blocks, 108) * scale.view(np.int8).astype(np.float32))


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * sc * q - dmin * mn, six-bit sc and mn for every run."""
    scale, offset = _six_bits(blocks[:, 4:16])
    out.reshape(-1)[...] = interleave(nibbles(blocks[:, 16:144]), 32)
    _scale(out, half(blocks, 0) * scale)
    _shift(out, half(blocks, 2) * offset)


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K with a fifth bit for each weight."""
    scale, offset = _six_bits(blocks[:, 4:16])
    codes = interleave(nibbles(blocks[:, 48:176]), 32)
    codes |= interleave(_bit_planes(blocks[:, 16:48], 4), 32)
    out.reshape(-1)[...] = codes
    _scale(out, half(blocks, 0) * scale)
    _shift(out, half(blocks, 2) * offset)


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * sc * (q - 32), a signed scale byte for every 16 weights."""
    codes = interleave(nibbles(blocks[:, :128]), 64)
    bits = np.ascontiguousarray(blocks[:, 128:192])
    codes |= interleave([(bits & 3) << 4, (bits & 12) << 2, bits & 48, (bits & 192) >> 2], 32)
    codes -= 32
    out.reshape(-1)[...] = codes.view(np.int8)
    _scale(out, half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


def tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (trit - 1), five trits to a byte, four in the last bytes: the digits base 3."""
    start = 0
    for first, width, trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        packed = np.ascontiguousarray(blocks[:, first : first + width])
        for _ in range(trits):
            out[:, start : start + width] = (packed.astype(np.uint16) * 3 >> 8).astype(np.int8)
            packed *= 3  # the next digit, modulo 256
            start += width
    out -= 1
    out *= half(blocks, 52)


def tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (q - 1), two bits each, as Q2_K packs them."""
    out.reshape(-1)[...] = _two_bits(blocks[:, :64])
    out -= 1
    out *= half(blocks, 64)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Codes of bytes [N, 64], flat: the four runs of a half share its 32 bytes."""
    packed = np.ascontiguousarray(packed)
    return interleave([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 32)


def _bit_planes(packed: np.ndarray, place: int) -> list[np.ndarray]:
    """Bit r of every byte, for the eight runs r, moved to bit `place`."""
    packed = np.ascontiguousarray(packed)
    masked = [packed & (1 << r) for r in range(8)]
    return [m << place - r if r < place else m >> r - place for r, m in enumerate(masked)]


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets, float32 [N, 8], of 12 bytes (Q4_K, Q5_K)."""
    first, second, third = _words(packed)
    scale_top, offset_top = (first >> 6 & LOW_2) << 4, (second >> 6 & LOW_2) << 4
    scale = [first & LOW_6, third & LOW_4 | scale_top]
    offset = [second & LOW_6, third >> 4 & LOW_4 | offset_top]
    both = _bytes(scale + offset).astype(np.float32)
    return both[:, :8], both[:, 8:]


def _words(packed: np.ndarray) -> list[np.ndarray]:
    """The 32-bit words of bytes [N, 4 M], each [N]: four bytes are worked on at once."""
    words = np.ascontiguousarray(packed).view("<u4")
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]


def _bytes(words: list[np.ndarray]) -> np.ndarray:
    """The bytes [N, 4 M] of M arrays of words [N]."""
    return np.stack(words, axis=1).astype("<u4", copy=False).view(np.uint8)


def _scale(out: np.ndarray, by: np.ndarray) -> None:
    groups = out.reshape(*by.shape, -1)
    groups *= by[:, :, None]


def _shift(out: np.ndarray, by: np.ndarray) -> None:
    groups = out.reshape(*by.shape, -1)
    groups -= by[:, :, None]
