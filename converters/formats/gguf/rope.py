"""Llama 3's rotary scaling as the divisors that a GGUF file stores, and recovered from them."""

import math
from collections.abc import Iterator

import numpy as np

from dflash_jax.config import RopeConfig
from dflash_jax.errors import ConfigError

FINE = 4096.0
TOLERANCE = 1e-3  # divisors are stored as float32 of a few significant operations


def llama3_divisors(rope: RopeConfig, width: int) -> np.ndarray:
    """Return the divisors [width / 2] that stand for a llama3 scaling."""
    turns = rope.theta ** (-np.arange(width // 2) / (width // 2)) / (2 * math.pi)
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    return _divisors(turns, rope.factor, high / low, rope.original_length / low)


def llama3_scaling(divisors: np.ndarray, theta: float, *, where: str) -> dict[str, float | str]:
    """Return the `rope_scaling` of config.json that gives these divisors [H/2].

    A divisor is 1 for short wavelengths and `factor` for long ones. Between, with
    s = original / wavelength, 1/divisor is linear in s, from 1/factor at low_freq_factor to 1 at
    high_freq_factor. Divisors depend on ratios of the three only, so low_freq_factor is chosen:
    1 for published settings, else large enough that an integer is exact enough for the original
    length.

    Raises:
      ConfigError: no scaling gives these divisors.
    """
    divisors = divisors.astype(np.float64)
    factor = float(divisors.max(initial=0.0))
    if not np.isfinite(divisors).all() or divisors.min(initial=1.0) < 1.0 or not theta > 1.0:
        raise ConfigError(
            f"{where}: rope_freqs.weight must hold divisors of at least 1 and the rotary base"
            f" exceed 1 (it is {theta}); fetch the file again"
        )
    turns = theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    for high, length in _candidates(divisors, turns, factor):
        low = 1.0 if length == round(length) else min(FINE, 2**30 // max(length, 1.0))
        original = round(low * length)
        if np.allclose(divisors, _divisors(turns, factor, high, original / low), rtol=TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": float(low * high),
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{where}: rope_freqs.weight fits no llama3 scaling; use the Hugging Face folder instead"
    )


def _candidates(
    divisors: np.ndarray, turns: np.ndarray, factor: float
) -> Iterator[tuple[float, float]]:
    """Yield published settings first, then those that fit the divisors between the ends.

    Each is (high_freq_factor, original length), for a low_freq_factor of 1.
    """
    yield 4.0, 8192
    if factor <= 1.0:
        return
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # 0 long, 1 short wavelengths
    between = (share > 0.01) & (share < 0.99)
    if between.sum() >= 2:
        slope, offset = np.polyfit(turns[between], share[between], 1)
        if offset < 0:
            yield round(1 - 1 / offset, 3), round(-slope / offset)
            yield 1 - 1 / offset, -slope / offset
    elif between.any():  # a line through one point
        at = float(turns[between][0])
        of = float(share[between][0])
        yield 4.0, round((3 * of + 1) / at)
        for high in (4.0, *np.geomspace(1.01, 1e3, 400)):
            yield high, ((high - 1) * of + 1) / at
    else:
        kept = turns[share >= 0.99]
        scaled = turns[share <= 0.01]
        yield 4.0, math.ceil(4 / kept.min(initial=np.inf))
        length = float(1 / scaled.max())
        yield max(length * float(kept.min(initial=4 / length)), 1.01), length


def _divisors(turns: np.ndarray, factor: float, high: float, original: float) -> np.ndarray:
    share = np.clip((original * turns - 1) / (high - 1), 0, 1)
    return 1 / (share + (1 - share) / factor)
