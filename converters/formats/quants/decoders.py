"""What blocks of ggml formats hold: codes, and what these are multiplied by.

Each decoder is the function of its type's name in lower case, of blocks [N, bytes]. Facts from
ggml-common.h and ggml-quants.c.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_jax.quant.formats import E2M1, IQ4_VALUES


class Parts(NamedTuple):
    """The parts of N blocks of B weights: a weight is scale * sub * code - low * sub_low.

    Attributes:
      codes: int8 [N, B].
      scale: float32 [N, G], each for B / G weights.
      sub: whole numbers [N, G'], each for B / G' weights; None for ones.
      low: float32 [N, G]; None for zeros.
      sub_low: as `sub`.
    """

    codes: np.ndarray
    scale: np.ndarray
    sub: np.ndarray | None = None
    low: np.ndarray | None = None
    sub_low: np.ndarray | None = None

    @property
    def factors(self) -> np.ndarray:
        """Scales with what they are multiplied by, float32 [N, G']."""
        return self.scale if self.sub is None else self.scale * self.sub.astype(np.float32)

    @property
    def offsets(self) -> np.ndarray | None:
        """What is subtracted, float32 [N, G'], or None."""
        if self.low is None or self.sub_low is None:
            return self.low
        return self.low * self.sub_low.astype(np.float32)


def q8_0(blocks: np.ndarray) -> Parts:
    """w = d * q, q a signed byte."""
    return Parts(blocks[:, 2:].view(np.int8), half(blocks, 0))


def q4_0(blocks: np.ndarray) -> Parts:
    """w = d * (q - 8)."""
    codes = interleave(nibbles(blocks[:, 2:]), 16)
    codes -= 8
    return _parts(codes, half(blocks, 0))


def q4_1(blocks: np.ndarray) -> Parts:
    """w = d * q + m."""
    codes = interleave(nibbles(blocks[:, 4:]), 16)
    return _parts(codes, half(blocks, 0), low=-half(blocks, 2))


def q5_0(blocks: np.ndarray) -> Parts:
    """w = d * (q - 16); the fifth bits are stored separately."""
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    codes -= 16
    return _parts(codes, half(blocks, 0))


def q5_1(blocks: np.ndarray) -> Parts:
    """w = d * q + m; the fifth bits are stored separately."""
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return _parts(codes, half(blocks, 0), low=-half(blocks, 2))


def _parts(
    codes: np.ndarray,
    scale: np.ndarray,
    *,
    sub: np.ndarray | None = None,
    low: np.ndarray | None = None,
    sub_low: np.ndarray | None = None,
) -> Parts:
    """Return the parts of flat codes."""
    return Parts(codes.view(np.int8).reshape(len(scale), -1), scale, sub, low, sub_low)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte `at` of every block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and the high four bits of bytes, contiguous."""
    if packed.shape[-1] < 64:  # short rows cost more than the copy
        packed = np.ascontiguousarray(packed)
    return packed & 15, packed >> 4


def interleave(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return bytes taken in turn from each part, `width` at a time: flat, in the parts' dtype."""
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


# The 256-weight formats. A run is 32 consecutive weights; a half is four runs.

# The low bits of each byte of a word.
LOW_2 = np.uint32(0x03030303)
LOW_4 = np.uint32(0x0F0F0F0F)
LOW_6 = np.uint32(0x3F3F3F3F)


def q2_k(blocks: np.ndarray) -> Parts:
    """w = d * sc * q - dmin * mn, a scale byte (sc low, mn high) for every 16 weights."""
    sub, sub_low = nibbles(blocks[:, :16])
    scale = half(blocks, 80)
    low = half(blocks, 82)
    return _parts(_two_bits(blocks[:, 16:80]), scale, sub=sub, low=low, sub_low=sub_low)


def q3_k(blocks: np.ndarray) -> Parts:
    """w = d * (sc - 32) * q; the third bit is stored separately, inverted."""
    codes = _two_bits(blocks[:, 32:96])
    codes -= 4
    codes += interleave(_bit_planes(blocks[:, :32], 2), 32)
    low, high, top = _words(blocks[:, 96:108])
    parts = [low, high, low >> 4, high >> 4]
    words = [part & LOW_4 | (top >> 2 * k & LOW_2) << 4 for k, part in enumerate(parts)]
    sub = _bytes(words)
    sub -= 32
    return _parts(codes, half(blocks, 108), sub=sub.view(np.int8))


def q4_k(blocks: np.ndarray) -> Parts:
    """w = d * sc * q - dmin * mn, six-bit sc and mn for every run."""
    sub, sub_low = _six_bits(blocks[:, 4:16])
    codes = interleave(nibbles(blocks[:, 16:144]), 32)
    return _parts(codes, half(blocks, 0), sub=sub, low=half(blocks, 2), sub_low=sub_low)


def q5_k(blocks: np.ndarray) -> Parts:
    """w = d * sc * q - dmin * mn as in Q4_K, with a fifth bit for each weight."""
    sub, sub_low = _six_bits(blocks[:, 4:16])
    codes = interleave(nibbles(blocks[:, 48:176]), 32)
    codes |= interleave(_bit_planes(blocks[:, 16:48], 4), 32)
    return _parts(codes, half(blocks, 0), sub=sub, low=half(blocks, 2), sub_low=sub_low)


def q6_k(blocks: np.ndarray) -> Parts:
    """w = d * sc * (q - 32), a signed scale byte for every 16 weights."""
    codes = interleave(nibbles(blocks[:, :128]), 64)
    bits = np.ascontiguousarray(blocks[:, 128:192])
    codes |= interleave([(bits & 3) << 4, (bits & 12) << 2, bits & 48, (bits & 192) >> 2], 32)
    codes -= 32
    return _parts(codes, half(blocks, 208), sub=blocks[:, 192:208].view(np.int8))


def tq1_0(blocks: np.ndarray) -> Parts:
    """w = d * (trit - 1), five trits to a byte, four in the last bytes: the digits base 3."""
    codes = np.empty((len(blocks), 256), np.int8)
    start = 0
    for first, width, trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        packed = np.ascontiguousarray(blocks[:, first : first + width])
        for _ in range(trits):
            codes[:, start : start + width] = (packed.astype(np.uint16) * 3 >> 8).astype(np.int8)
            packed *= 3  # the next digit, modulo 256
            start += width
    codes -= 1
    return Parts(codes, half(blocks, 52))


def tq2_0(blocks: np.ndarray) -> Parts:
    """w = d * (q - 1), two bits each, as Q2_K packs them."""
    codes = _two_bits(blocks[:, :64])
    codes -= 1
    return _parts(codes, half(blocks, 64))


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Return the codes of bytes [N, 64], flat: the four runs of a half share its 32 bytes."""
    packed = np.ascontiguousarray(packed)
    return interleave([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 32)


def _bit_planes(packed: np.ndarray, place: int) -> list[np.ndarray]:
    """Return bit r of every byte, for the eight runs r, moved to bit `place`."""
    packed = np.ascontiguousarray(packed)
    masked = [packed & (1 << r) for r in range(8)]
    return [m << place - r if r < place else m >> r - place for r, m in enumerate(masked)]


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight offsets, uint8 [N, 8], of 12 bytes (Q4_K, Q5_K)."""
    first, second, third = _words(packed)
    scale_top = (first >> 6 & LOW_2) << 4
    offset_top = (second >> 6 & LOW_2) << 4
    scale = [first & LOW_6, third & LOW_4 | scale_top]
    offset = [second & LOW_6, third >> 4 & LOW_4 | offset_top]
    both = _bytes(scale + offset)
    return both[:, :8], both[:, 8:]


def _words(packed: np.ndarray) -> list[np.ndarray]:
    """Return the 32-bit words of bytes [N, 4 M], each [N]: four bytes are worked on at once."""
    words = np.ascontiguousarray(packed).view("<u4")
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]


def _bytes(words: list[np.ndarray]) -> np.ndarray:
    """Return the bytes [N, 4 M] of M arrays of words [N]."""
    return np.stack(words, axis=1).astype("<u4", copy=False).view(np.uint8)


# Formats whose codes of one, two or four bits index a table of values.


def _tables(values: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the signed values of the low and the high nibble of each byte."""
    codes = np.arange(256)
    signed = np.array(values, np.int8)
    return signed[codes & 15].tobytes(), signed[codes >> 4].tobytes()


def _runs(bits: int, values: tuple[int, ...]) -> np.ndarray:
    """Return the signed values of each byte's codes, lowest first, as one word."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return np.array(values, np.int8)[codes].view(f"u{8 // bits}")[:, 0]


SIGN_RUNS = _runs(1, (-1, 1))
TWO_BIT_RUNS = _runs(2, (-1, 0, 1, 2))
IQ4_TABLES = _tables(IQ4_VALUES)
E2M1_TABLES = _tables(E2M1)


def q1_0(blocks: np.ndarray) -> Parts:
    """w = d, or -d where the bit is not set, 128 weights to a block."""
    return _parts(SIGN_RUNS[blocks[:, 2:]], half(blocks, 0))


def q2_0(blocks: np.ndarray) -> Parts:
    """w = d * (q - 1), 64 weights to a block, four neighbours to a byte."""
    return _parts(TWO_BIT_RUNS[blocks[:, 2:]], half(blocks, 0))


def iq4_nl(blocks: np.ndarray) -> Parts:
    """w = d * value[q], 32 weights to a block."""
    return _parts(_look_up(IQ4_TABLES, blocks[:, 2:]), half(blocks, 0))


def iq4_xs(blocks: np.ndarray) -> Parts:
    """w = d * (sc - 32) * value[q], 256 weights to a block, a six-bit scale for every 32."""
    low, high = nibbles(blocks[:, 4:8])
    sub = np.stack([low, high], axis=-1).reshape(-1, 8)
    top = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    sub |= top.astype(np.uint8) << 4
    sub -= 32
    return _parts(_look_up(IQ4_TABLES, blocks[:, 8:]), half(blocks, 0), sub=sub.view(np.int8))


def mxfp4(blocks: np.ndarray) -> Parts:
    """w = 2^(e - 128) * doubled value[q], 32 weights to a block."""
    return _parts(_look_up(E2M1_TABLES, blocks[:, 1:]), halved_power(blocks[:, :1]))


def nvfp4(blocks: np.ndarray) -> Parts:
    """w = scale / 2 * doubled value[q], 64 weights to a block, a scale byte for every 16."""
    packed = blocks[:, 4:].tobytes()
    codes = [np.frombuffer(packed.translate(table), np.int8) for table in E2M1_TABLES]
    return _parts(interleave(codes, 8), _HALVED_SCALES[blocks[:, :4]])


def _halved_scale(code: int) -> float:
    """Return half of an E4M3 number whose sign is left out; the code of all ones is 0."""
    exponent = code >> 3 & 15
    mantissa = code & 7
    if code == 0x7F:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)


_HALVED_SCALES = np.array([_halved_scale(code) for code in range(256)], np.float32)


def halved_power(exponent: np.ndarray) -> np.ndarray:
    """Return 2^(e - 128) as float32, exact also where it is subnormal (e of 0 and 1)."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)


def _look_up(tables: tuple[bytes, bytes], packed: np.ndarray) -> np.ndarray:
    """Return, for every 16 bytes, the values of low nibbles, then those of high ones; flat."""
    raw = packed.tobytes()
    parts = [np.frombuffer(raw.translate(table), np.int8) for table in tables]
    return interleave(parts, 16)


# The 256-weight formats whose codes choose vectors of a grid: IQ1, IQ2 and IQ3.
#
# A vector is 8 small whole numbers, or 4 in IQ3. Those of IQ2 and IQ3 are positive: each weight has
# a bit that makes it negative. The grids are in grids.npz.


QUARTER = np.float32(0.25)
HALF = np.float32(0.5)


def iq1_s(blocks: np.ndarray) -> Parts:
    """w = d * (2 sc + 1) * (v +- 1/8), a three-bit sc and one shift for every 32 weights."""
    high = _fields(blocks[:, 34:50], "<u2")
    code = high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    code |= (high >> 12 & 8)[:, :, None]
    scale = half(blocks, 0) * _odd(high >> 12 & 7)
    return _parts(_shifted(blocks[:, 2:34], code), scale / 8)


def iq1_m(blocks: np.ndarray) -> Parts:
    """w as in IQ1_S, with sc for every 16 weights, a shift for every 8, and d in four pieces."""
    fields = _fields(blocks[:, 48:56], "<u2")
    d = np.bitwise_or.reduce(fields >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scale = fields[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scale = d.view(np.float16).astype(np.float32)[:, None] * _odd(scale.reshape(-1, 16))
    return _parts(_shifted(blocks[:, :32], _in_turn(blocks[:, 32:48])), scale / 8)


def iq2_xxs(blocks: np.ndarray) -> Parts:
    """w = d * (sc + 1/2) / 4 * v, a four-bit sc for every 32 weights."""
    words = _fields(blocks[:, 2:66], "<u4").reshape(-1, 8, 2)
    scale, signs = _scale_and_signs(words[:, :, 1])
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    return _parts(_signed("IQ2_XXS", index, signs), half(blocks, 0) * scale * QUARTER)


def iq2_xs(blocks: np.ndarray) -> Parts:
    """w as in IQ2_XXS, with sc for every 16 weights and more vectors."""
    codes = _fields(blocks[:, 2:66], "<u2")
    scale = half(blocks, 0) * (_in_turn(blocks[:, 66:74]) + HALF)
    return _parts(_signed("IQ2_XS", codes & 511, _EVEN[codes >> 9]), scale * QUARTER)


def iq2_s(blocks: np.ndarray) -> Parts:
    """w as in IQ2_XS, with more vectors yet, and all signs stored."""
    high = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    scale = half(blocks, 0) * (_in_turn(blocks[:, 74:82]) + HALF)
    codes = _signed("IQ2_S", _joined(blocks[:, 2:34], high), _SIGNS[blocks[:, 34:66]])
    return _parts(codes, scale * QUARTER)


def iq3_xxs(blocks: np.ndarray) -> Parts:
    """w = d * (sc + 1/2) / 2 * v, a four-bit sc for every 32 weights."""
    scale, signs = _scale_and_signs(_fields(blocks[:, 66:98], "<u4"))
    return _parts(_signed("IQ3_XXS", blocks[:, 2:66], signs), half(blocks, 0) * scale * HALF)


def iq3_s(blocks: np.ndarray) -> Parts:
    """w = d * (2 sc + 1) * v, a four-bit sc for every 32 weights, all signs stored."""
    high = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little")
    codes = _signed("IQ3_S", _joined(blocks[:, 2:66], high), _SIGNS[blocks[:, 74:106]])
    return _parts(codes, half(blocks, 0) * _odd(_in_turn(blocks[:, 106:110])))


def _vectors_as_words(values: np.ndarray) -> np.ndarray:
    """Return rows of int8 [N, 4 or 8], each as one word, so that a vector is gathered at once."""
    return np.ascontiguousarray(values).view(f"u{values.shape[1]}")[:, 0]


@cache
def vectors(name: str) -> np.ndarray:
    """Return the grid of a type, each vector as one word; its file is read once."""
    with np.load(Path(__file__).with_name("grids.npz")) as stored:
        return _vectors_as_words(stored[name])


@cache
def _shifted_vectors() -> np.ndarray:
    """Return 8 v + 1 for every vector v of IQ1, then 8 v - 1."""
    eightfold = vectors("IQ1_S").view(np.int8).reshape(-1, 8) * np.int8(8)
    return _vectors_as_words(np.concatenate([eightfold + np.int8(1), eightfold - np.int8(1)]))


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
# Which of eight weights a byte makes negative, as factors.
_SIGNS = _vectors_as_words(1 - 2 * np.unpackbits(_BYTES, axis=1, bitorder="little").astype(np.int8))
# Where seven bits are stored, the eighth makes the number of negative weights even.
_EVEN = _SIGNS[_BYTES[:128, 0] | (np.bitwise_count(_BYTES[:128, 0]) & 1) << 7]


def _signed(name: str, index: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return vectors of a grid times their signs, int8 and flat."""
    return vectors(name)[index].reshape(-1).view(np.int8) * signs.reshape(-1).view(np.int8)


def _shifted(low: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Return vectors of IQ1 times 8, shifted.

    Args:
      code: three high bits of the index, and the bit of the shift.
    """
    return _shifted_vectors()[_joined(low, code)].reshape(-1).view(np.int8)


def _scale_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what words [N, 8] hold for 32 weights each: sc + 1/2, and four times seven signs."""
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return (words >> 28).astype(np.float32) + HALF, _EVEN[signs]


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return indices [N, M] from their low bytes and the bits above these."""
    return low | high.reshape(low.shape).astype(np.uint16) << 8


def _in_turn(packed: np.ndarray) -> np.ndarray:
    """Return the low and the high four bits of each byte: [N, 2 M] of [N, M]."""
    return np.stack(nibbles(packed), axis=-1).reshape(len(packed), -1)


def _odd(scale: np.ndarray) -> np.ndarray:
    return (2 * scale + 1).astype(np.float32)


def _fields(packed: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(packed).view(dtype)
