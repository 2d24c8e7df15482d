"""Blocks of ggml formats, made of weights: what `decoders` takes apart.

Each encoder is the function of its type's name in lower case. It takes weights float32 [N, B], and
how much the error of each counts, [N, B] or None; it returns the parts of N blocks in order, uint8
[N, bytes]. Q8_0, and without such factors Q4_0 and Q4_1, are to the bits of `quantize_row_*_ref` in
ggml-quants.c, with every operation rounded to float32: a compiler that fuses products and sums may
choose the neighbouring code for a weight halfway between two. The others search their scales.
"""

from typing import NamedTuple

import numpy as np

from dflash_jax.converters.formats.quants.search import (
    Codes,
    codes_of,
    fit_range,
    fit_scale,
    inverse,
)
from dflash_jax.quant.formats import E2M1, IQ4_VALUES

Blocks = tuple[np.ndarray, ...]  # parts of N blocks in order, each of N rows
Factors = np.ndarray | None  # float32 [N, B]


def q8_0(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale and signed codes, rounded half away from zero as by C's roundf."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += size - whole >= np.float32(0.5)
    return _half(scale), np.copysign(whole, scaled).astype(np.int8)


def q4_0(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale and codes; by ggml, the weight of largest magnitude has the code 0."""
    if factors is not None:
        scale, codes = scaled(x, factors, Codes(-8, 7))
        return scale, _nibbles(codes + 8)
    first = np.abs(x).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(x, first, axis=1) / np.float32(-8)
    return _half(scale), _nibbles(_truncated(x * inverse(scale) + np.float32(8.5)))


def q4_1(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale, the least weight, and codes relative to it."""
    if factors is not None:
        scale, low, codes = _ranged(x, factors, 15)
        return scale, low, _nibbles(codes)
    least = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - least) / np.float32(15)
    codes = (x - least) * inverse(scale) + np.float32(0.5)
    return _half(scale), _half(least), _nibbles(_truncated(codes))


def q5_0(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale, fifth bits, and the lower four of the codes."""
    scale, codes = scaled(x, factors, Codes(-16, 15))
    codes = codes + np.uint8(16)
    return scale, _bits(codes >> 4), _nibbles(codes & 15)


def q5_1(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale, the least weight, fifth bits, and the lower four of the codes."""
    scale, low, codes = _ranged(x, factors, 31)
    return scale, low, _bits(codes >> 4), _nibbles(codes & 15)


def iq4_nl(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the scale and the places of codes in the table."""
    scale, codes = scaled(x, factors, IQ4)
    return scale, _nibbles(_IQ4_PLACES[codes])


def mxfp4(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return the exponent and the places of codes in the table."""
    weight = _columns(_weights(x, factors), x.shape[1])
    x = _columns(x, x.shape[1])
    _, exponent = np.frexp(np.abs(x).max(axis=0))
    # Powers of two that bring the largest weight near the largest number, 12 halves.
    best = np.full(x.shape[1], np.inf, np.float32)
    kept = np.zeros(x.shape[1], np.int32)
    codes = np.zeros(x.shape, np.uint8)
    for step in (-4, -3, -2):
        power = np.clip(exponent + np.int32(128 + step), 0, 254)
        scale = np.ldexp(np.float32(1), power - 128)
        each = FP4.nearest(x * inverse(scale))
        error = np.einsum("sm,sm->m", weight, np.square(each * scale - x))
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(kept, power, where=better)
        np.copyto(codes, each.astype(np.int8).view(np.uint8), where=better)
    return kept.astype(np.uint8)[:, None], _nibbles(_FP4_PLACES[codes].T)


def q2_k(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return four-bit scales and lows for every 16 weights, codes, and their factors."""
    parts = _ranged_runs(x, factors, groups=16, top=3, most=15)
    return parts.sub | parts.sub_low << 4, _two_bits(parts.codes), parts.scale, parts.low


def q3_k(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return third bits, codes, and six-bit scales for every 16 weights with their factor."""
    scale, sub, codes = _scaled_runs(x, factors, 16, Codes(-4, 3), Codes(-32, 31))
    codes = codes + np.uint8(4)
    sub = sub + np.uint8(32)
    low = sub[:, :8] & 15 | (sub[:, 8:] & 15) << 4
    top = _joined(sub.reshape(-1, 4, 4).swapaxes(1, 2) >> 4, 2)
    return _planes(codes >> 2), _two_bits(codes & 3), low, top, scale


def q4_k(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return factors of scales and lows, these in six bits for every run, and codes."""
    parts = _ranged_runs(x, factors, groups=8, top=15, most=63)
    return parts.scale, parts.low, _six_bits(parts.sub, parts.sub_low), _run_pairs(parts.codes)


def q5_k(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return what Q4_K has, with fifth bits before the lower four of the codes."""
    parts = _ranged_runs(x, factors, groups=8, top=31, most=63)
    six = _six_bits(parts.sub, parts.sub_low)
    codes = parts.codes
    return parts.scale, parts.low, six, _planes(codes >> 4), _run_pairs(codes & 15)


def q6_k(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return low and high bits of codes, and a signed scale for every 16 weights."""
    scale, sub, codes = _scaled_runs(x, factors, 16, Codes(-32, 31), Codes(-128, 127))
    halves = (codes + np.uint8(32)).reshape(-1, 2, 4, 32)
    low = halves[:, :, :2] & 15 | (halves[:, :, 2:] & 15) << 4
    high = _joined(halves.swapaxes(2, 3) >> 4, 2)
    return low.reshape(len(x), 128), high.reshape(len(x), 64), sub, scale


def iq4_xs(x: np.ndarray, factors: Factors = None) -> Blocks:
    """Return six-bit scales for every 32 weights with their factor, and places in the table."""
    scale, sub, codes = _scaled_runs(x, factors, 8, IQ4, Codes(-32, 31))
    sub = sub + np.uint8(32)
    high = _joined((sub >> 4).reshape(-1, 2, 4), 2)
    low = sub[:, ::2] & 15 | (sub[:, 1::2] & 15) << 4
    places = _nibbles(_IQ4_PLACES[codes].reshape(-1, 32)).reshape(len(x), 128)
    return scale, high, low, places


def _places(values: tuple[int, ...]) -> np.ndarray:
    """Return the place of each number in a table, by the bits of the number as a byte."""
    places = np.zeros(256, np.uint8)
    for place, value in reversed(list(enumerate(values))):
        places[value & 255] = place
    return places


IQ4 = codes_of(IQ4_VALUES)
FP4 = codes_of(E2M1)
_IQ4_PLACES = _places(IQ4_VALUES)
_FP4_PLACES = _places(E2M1)


def _weights(x: np.ndarray, factors: Factors) -> np.ndarray:
    """Return how much errors count: more for large weights, up to their size.

    Of weights 1, |x|, x squared and this one, this one left a small trained model closest to itself
    with most types.
    """
    squares = np.square(x)
    size = np.sqrt(squares.mean(axis=1, keepdims=True) + squares)
    return size if factors is None else factors * size


def _columns(x: np.ndarray, size: int) -> np.ndarray:
    """Return groups of `size` weights as columns: [size, groups of a block, N], as [size, M]."""
    groups = x.reshape(len(x), -1, size)
    return np.ascontiguousarray(groups.transpose(2, 1, 0)).reshape(size, -1)


def _rows(columns: np.ndarray, count: int) -> np.ndarray:
    """Return numbers of columns as bytes of blocks [N, B]; the reverse of `_columns`."""
    small = columns.astype(np.int8).view(np.uint8).reshape(len(columns), -1, count)
    return np.ascontiguousarray(small.transpose(2, 1, 0)).reshape(count, -1)


def _outer(codes: Codes) -> list[float]:
    """Return guesses of the code of the largest weight, by which ranges are cut or widened."""
    if codes.values is not None:
        return [codes.least * share for share in np.linspace(0.9, 1.1, 9)] + [codes.greatest]
    return [codes.least + more for more in np.linspace(-0.9, 0.9, 13)]


def _tops(top: int) -> list[float]:
    """Return guesses of the code of the largest of weights that have a low."""
    return [top + min(1.0, top / 6) * more for more in np.linspace(-1, 1, 11)]


def scaled(x: np.ndarray, factors: Factors, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Return a float16 scale for each block, [N, 1], and codes [N, B]."""
    columns = _columns(x, x.shape[1])
    size = x.shape[1]
    weight = _columns(_weights(x, factors), size)
    scale = _half(fit_scale(columns, weight, codes, _outer(codes)).scale)
    chosen = codes.nearest(columns * inverse(scale.astype(np.float32)))
    return scale[:, None], _rows(chosen, len(x))


def _ranged(x: np.ndarray, factors: Factors, top: int) -> Blocks:
    """Return a float16 scale and least number for each block, [N, 1], and codes [N, B]."""
    columns = _columns(x, x.shape[1])
    size = x.shape[1]
    weight = _columns(_weights(x, factors), size)
    fit = fit_range(columns, weight, top, _tops(top), below=False)
    scale = _half(fit.scale)
    least = _half(-fit.low)
    codes = (columns - least.astype(np.float32)) * inverse(scale.astype(np.float32))
    codes = Codes(0, top).nearest(codes)
    return scale[:, None], least[:, None], _rows(codes, len(x))


def _scaled_runs(
    x: np.ndarray, factors: Factors, groups: int, codes: Codes, subs: Codes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float16 factors [N, 1], signed scales [N, groups], and codes [N, B] of blocks."""
    size = x.shape[1] // groups
    columns = _columns(x, size)
    weight = _columns(_weights(x, factors), size)
    fit = fit_scale(columns, weight, codes, _outer(codes))
    d, sub = _whole(fit.scale, fit.slope, subs, groups)
    scale = (d.astype(np.float32) * sub).reshape(-1)
    chosen = codes.nearest(columns * inverse(scale))
    signed = sub.T.astype(np.int8).view(np.uint8)
    return d[:, None], np.ascontiguousarray(signed), _rows(chosen, len(x))


class _RangedRuns(NamedTuple):
    """Parts of blocks whose runs have scales and lows: as `decoders.Parts`, and unsigned."""

    codes: np.ndarray
    scale: np.ndarray
    sub: np.ndarray
    low: np.ndarray
    sub_low: np.ndarray


def _ranged_runs(
    x: np.ndarray, factors: Factors, *, groups: int, top: int, most: int
) -> _RangedRuns:
    """Return the parts of blocks with codes up to `top`, scales and lows up to `most`."""
    size = x.shape[1] // groups
    columns = _columns(x, size)
    weight = _columns(_weights(x, factors), size)
    fit = fit_range(columns, weight, top, _tops(top), below=True)
    subs = Codes(0, most)
    d, sub = _whole(fit.scale, fit.slope, subs, groups)
    dmin, sub_low = _whole(fit.low, fit.low_slope, subs, groups)
    scale = (d.astype(np.float32) * sub).reshape(-1)
    low = (dmin.astype(np.float32) * sub_low).reshape(-1)
    codes = Codes(0, top).nearest((columns + low) * inverse(scale))
    small, small_low = (np.ascontiguousarray(each.T.astype(np.uint8)) for each in (sub, sub_low))
    return _RangedRuns(_rows(codes, len(x)), d[:, None], small, dmin[:, None], small_low)


def _whole(
    scale: np.ndarray, slope: np.ndarray, subs: Codes, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return float16 factors [N], and whole numbers [groups, N] that they are multiplied by."""
    scale = scale.reshape(groups, -1)
    slope = slope.reshape(groups, -1)
    step = 1 + subs.greatest // 64
    outer = list(range(subs.greatest, subs.greatest // 2, -step))
    if subs.least < 0:
        outer += range(subs.least, subs.least // 2, step)
    d = _half(fit_scale(scale, slope, subs, outer).scale)
    return d, subs.nearest(scale * inverse(d.astype(np.float32)))


def _half(values: np.ndarray) -> np.ndarray:
    """Return numbers as float16.

    Raises:
      OverflowError: one is too large.
    """
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise OverflowError
    return halves


def _truncated(codes: np.ndarray) -> np.ndarray:
    return np.minimum(codes.astype(np.int8).view(np.uint8), 15)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return codes of four bits, the first half of a block in the low ones."""
    half = codes.shape[1] // 2
    return codes[:, :half] | codes[:, half:] << 4


def _run_pairs(codes: np.ndarray) -> np.ndarray:
    """Return codes of four bits [N, 256], the first of two runs in the low ones."""
    runs = codes.reshape(-1, 4, 2, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128)


def _bits(codes: np.ndarray) -> np.ndarray:
    """Return codes of one bit [N, 32], the first in the lowest place."""
    return np.packbits(codes, axis=1, bitorder="little")


def _planes(codes: np.ndarray) -> np.ndarray:
    """Return codes of one bit [N, 256]: byte j holds number j of every run, the first lowest."""
    return np.packbits(codes.reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """Return codes of two bits [N, 256]: the four runs of a half share its bytes."""
    return _joined(codes.reshape(-1, 2, 4, 32).swapaxes(2, 3), 2).reshape(-1, 64)


def _joined(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes along the last axis in one byte, the first in the lowest bits."""
    places = np.arange(0, bits * codes.shape[-1], bits, dtype=np.uint8)
    return np.bitwise_or.reduce(codes << places, axis=-1)


def _six_bits(sub: np.ndarray, sub_low: np.ndarray) -> np.ndarray:
    """Return eight scales and lows, [N, 8] each, in 12 bytes."""
    first = sub[:, :4] | sub[:, 4:] >> 4 << 6
    second = sub_low[:, :4] | sub_low[:, 4:] >> 4 << 6
    return np.concatenate([first, second, sub[:, 4:] & 15 | (sub_low[:, 4:] & 15) << 4], axis=1)
