"""Scales of groups of weights, found by weighted least squares.

Groups are columns: x [S, M] holds M groups of S weights, so that sums add whole rows. For a number
of first guesses, weights are rounded to codes, and the scale that fits these codes best follows.
The guess that explains most of the weights is kept, and refined by rounding with its own scale.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SMALLEST = 1e-34  # scale that is not taken for 0
# Part of the largest weight of a group that others have at least: less would be lost in rounding
# where an offset is fitted, too.
LEAST_WEIGHT = np.float32(1e-4)
REFINEMENTS = 2  # more change less than a thousandth of the error


class Codes(NamedTuple):
    """The whole numbers that codes stand for.

    Attributes:
      least, greatest: the outer ones.
      values: where not all between them are codes: the nearest code of all numbers between two
        neighbouring halves. Codes change at halves only.
    """

    least: int
    greatest: int
    values: np.ndarray | None = None

    def nearest(self, scaled: np.ndarray) -> np.ndarray:
        """Return numbers rounded to codes, as float32; `scaled` is overwritten."""
        if self.values is None:
            np.rint(scaled, out=scaled)
            return np.clip(scaled, self.least, self.greatest, out=scaled)
        scaled *= 2
        np.floor(scaled, out=scaled)
        np.clip(scaled, 2 * self.least, 2 * self.greatest - 1, out=scaled)
        return self.values[scaled.astype(np.int16) - np.int16(2 * self.least)]


def codes_of(values: Sequence[int]) -> Codes:
    """Return codes that are a few whole numbers."""
    each = np.unique(np.array(values, np.float32))
    middles = np.arange(2 * each[0], 2 * each[-1]) / 2 + 0.25
    nearest = np.abs(middles[:, None] - each).argmin(axis=1)
    return Codes(int(each[0]), int(each[-1]), each[nearest])


def inverse(scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale, or 0 for scales so small that it could not be multiplied by codes."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(np.abs(scale) > SMALLEST, np.float32(1) / scale, np.float32(0))


class ScaleFit(NamedTuple):
    """Scales [M], and by how much the error grows with the square of a change in each, [M]."""

    scale: np.ndarray
    slope: np.ndarray


def fit_scale(x: np.ndarray, weight: np.ndarray, codes: Codes, outer: Sequence[float]) -> ScaleFit:
    """Return the scales for w = scale * code.

    Args:
      x, weight: float32 [S, M]; the error of x counts `weight` times.
      outer: guesses of the code, before rounding, of the weight of largest magnitude.
    """
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    unit = inverse(largest)
    kept, scale, slope = (np.zeros(x.shape[1], np.float32) for _ in range(3))
    weighted = weight * x
    for step in range(len(outer) + REFINEMENTS):
        guess = np.float32(outer[step]) * unit if step < len(outer) else inverse(scale)
        code = codes.nearest(x * guess)
        across = np.einsum("sm,sm->m", weighted, code)
        code *= code
        within = np.einsum("sm,sm->m", weight, code)
        each = across * inverse(within)
        better = (gain := each * across) > kept
        np.copyto(kept, gain, where=better)
        np.copyto(scale, each, where=better)
        np.copyto(slope, within, where=better)
    return ScaleFit(scale, slope)


class RangeFit(NamedTuple):
    """Scales and lows [M], and by how much the error grows with the square of a change."""

    scale: np.ndarray
    low: np.ndarray
    slope: np.ndarray
    low_slope: np.ndarray


def fit_range(
    x: np.ndarray, weight: np.ndarray, top: int, outer: Sequence[float], *, below: bool
) -> RangeFit:
    """Return scales and lows for w = scale * code - low, with codes from 0 to `top`.

    Args:
      outer: guesses of the code, before rounding, of the largest weight.
      below: whether lows are at least 0, as where they are stored without a sign.
    """
    weight = np.maximum(weight, LEAST_WEIGHT * weight.max(axis=0))
    least = np.minimum(x.min(axis=0), 0) if below else x.min(axis=0)
    shifted = x - least  # what is fitted to scale * code + rest
    unit = inverse(shifted.max(axis=0))
    weighted = weight * shifted
    count = weight.sum(axis=0)
    total = weighted.sum(axis=0)
    codes = Codes(0, top)
    kept = np.full(x.shape[1], -np.inf, np.float32)
    scale, rest, slope = (np.zeros(x.shape[1], np.float32) for _ in range(3))
    for step in range(len(outer) + REFINEMENTS):
        if step < len(outer):
            code = shifted * (np.float32(outer[step]) * unit)
        else:
            code = (shifted - rest) * inverse(scale)
        code = codes.nearest(code)
        across = np.einsum("sm,sm->m", weighted, code)
        single = np.einsum("sm,sm->m", weight, code)
        code *= code
        within = np.einsum("sm,sm->m", weight, code)
        each = (count * across - total * single) * inverse(count * within - single * single)
        offset = (total - each * single) * inverse(count)
        if below:  # a low below 0 is none: then the scale alone fits
            bounded = np.minimum(offset, -least)
            alone = (across - bounded * single) * inverse(within)
            each = np.where(offset > -least, alone, each)
            offset = bounded
        # What is left of the error, without the squares of the weights.
        gain = 2 * (each * across + offset * total) - each * each * within
        gain -= (2 * each * single + offset * count) * offset
        better = gain > kept
        np.copyto(kept, gain, where=better)
        np.copyto(scale, each, where=better)
        np.copyto(rest, offset, where=better)
        np.copyto(slope, within, where=better)
    return RangeFit(scale, -(least + rest), slope, count)
