"""The 256-weight formats whose codes choose vectors of a grid: IQ1, IQ2 and IQ3.

A vector is 8 small whole numbers, or 4 in IQ3. Those of IQ2 and IQ3 are positive: each weight has
a bit that makes it negative. Layouts, and the grids in grids.npz, are facts from ggml-quants.c and
ggml-common.h. Each decoder fills `out` [N, 256] from blocks [N, bytes].
"""

from functools import cache
from pathlib import Path

import numpy as np

from dflash_jax.converters.quants.legacy import half, nibbles

QUARTER, HALF = np.float32(0.25), np.float32(0.5)


def iq1_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (2 sc + 1) * (v +- 1/8), a three-bit sc and one shift for every 32 weights."""
    high = _fields(blocks[:, 34:50], "<u2")
    code = high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    code |= (high >> 12 & 8)[:, :, None]
    scale = half(blocks, 0) * _odd(high >> 12 & 7)
    _fill(out, _shifted(blocks[:, 2:34], code), scale / 8)


def iq1_m(blocks: np.ndarray, out: np.ndarray) -> None:
    """As IQ1_S with sc for every 16 weights, a shift for every 8, and d in four pieces."""
    fields = _fields(blocks[:, 48:56], "<u2")
    d = np.bitwise_or.reduce(fields >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scale = fields[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scale = d.view(np.float16).astype(np.float32)[:, None] * _odd(scale.reshape(-1, 16))
    _fill(out, _shifted(blocks[:, :32], _in_turn(blocks[:, 32:48])), scale / 8)


def iq2_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (sc + 1/2) / 4 * v, a four-bit sc for every 32 weights."""
    words = _fields(blocks[:, 2:66], "<u4").reshape(-1, 8, 2)
    scale, signs = _scale_and_signs(words[:, :, 1])
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    _fill(out, _signed("IQ2_XXS", index, signs), half(blocks, 0) * scale * QUARTER)


def iq2_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """As IQ2_XXS with sc for every 16 weights and more vectors."""
    codes = _fields(blocks[:, 2:66], "<u2")
    scale = half(blocks, 0) * (_in_turn(blocks[:, 66:74]) + HALF)
    _fill(out, _signed("IQ2_XS", codes & 511, _EVEN[codes >> 9]), scale * QUARTER)


def iq2_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """As IQ2_XS with more vectors yet, and all signs stored."""
    high = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    scale = half(blocks, 0) * (_in_turn(blocks[:, 74:82]) + HALF)
    codes = _signed("IQ2_S", _joined(blocks[:, 2:34], high), _SIGNS[blocks[:, 34:66]])
    _fill(out, codes, scale * QUARTER)


def iq3_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (sc + 1/2) / 2 * v, a four-bit sc for every 32 weights."""
    scale, signs = _scale_and_signs(_fields(blocks[:, 66:98], "<u4"))
    _fill(out, _signed("IQ3_XXS", blocks[:, 2:66], signs), half(blocks, 0) * scale * HALF)


def iq3_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (2 sc + 1) * v, a four-bit sc for every 32 weights, all signs stored."""
    high = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little")
    codes = _signed("IQ3_S", _joined(blocks[:, 2:66], high), _SIGNS[blocks[:, 74:106]])
    _fill(out, codes, half(blocks, 0) * _odd(_in_turn(blocks[:, 106:110])))


def _words(values: np.ndarray) -> np.ndarray:
    """Rows of int8 [N, 4 or 8], each as one word: gathered as one."""
    return np.ascontiguousarray(values).view(f"u{values.shape[1]}")[:, 0]


@cache
def vectors(name: str) -> np.ndarray:
    """The grid of a type, each vector as one word; from its file once."""
    with np.load(Path(__file__).with_name("grids.npz")) as stored:
        return _words(stored[name])


@cache
def _shifted_vectors() -> np.ndarray:
    """8 v + 1 for every vector v of IQ1, then 8 v - 1."""
    eightfold = vectors("IQ1_S").view(np.int8).reshape(-1, 8) * np.int8(8)
    return _words(np.concatenate([eightfold + np.int8(1), eightfold - np.int8(1)]))


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
# Which of eight weights a byte makes negative, as factors.
_SIGNS = _words(1 - 2 * np.unpackbits(_BYTES, axis=1, bitorder="little").astype(np.int8))
# Where seven bits are stored, the eighth makes the number of negative weights even.
_EVEN = _SIGNS[_BYTES[:128, 0] | (np.bitwise_count(_BYTES[:128, 0]) & 1) << 7]


def _signed(name: str, index: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Vectors of a grid times their signs, int8 and flat."""
    return vectors(name)[index].reshape(-1).view(np.int8) * signs.reshape(-1).view(np.int8)


def _shifted(low: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Vectors of IQ1 times 8, shifted; a code is three high bits of the index and the shift's."""
    return _shifted_vectors()[_joined(low, code)].reshape(-1).view(np.int8)


def _scale_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What words [N, 8] hold for 32 weights each: sc + 1/2, and four times seven signs."""
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return (words >> 28).astype(np.float32) + HALF, _EVEN[signs]


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Indices [N, M] of their low bytes and of what is above them."""
    return low | high.reshape(low.shape).astype(np.uint16) << 8


def _in_turn(packed: np.ndarray) -> np.ndarray:
    """The low and the high four bits of each byte: [N, 2 M] of [N, M]."""
    return np.stack(nibbles(packed), axis=-1).reshape(len(packed), -1)


def _odd(scale: np.ndarray) -> np.ndarray:
    return (2 * scale + 1).astype(np.float32)


def _fields(packed: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(packed).view(dtype)


def _fill(out: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> None:
    """Codes times scales [N, M], each for 256 / M weights."""
    out.reshape(-1)[...] = codes
    groups = out.reshape(*scale.shape, -1)
    groups *= scale[:, :, None]
