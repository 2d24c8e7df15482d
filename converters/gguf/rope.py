"""Llama 3's rotary scaling recovered from the divisors a GGUF file stores instead."""

import math

import numpy as np

from dflash_jax.errors import ConfigError

TOLERANCE = 1e-3  # divisors are stored as float32 of a few significant operations


def llama3_scaling(divisors: np.ndarray, theta: float, *, where: str) -> dict[str, float | str]:
    """The `rope_scaling` of config.json that gives these divisors [H/2].

    A divisor is 1 for short wavelengths and `factor` for long ones. Between, with
    s = original / wavelength, 1/divisor is linear in s, from 1/factor at low_freq_factor to 1 at
    high_freq_factor. Only ratios of the three show in the divisors, so low_freq_factor is set to 1.
    """
    divisors = divisors.astype(np.float64)
    factor = float(divisors.max(initial=0.0))
    if not np.isfinite(divisors).all() or divisors.min(initial=1.0) < 1.0 or not theta > 1.0:
        raise ConfigError(
            f"{where}: rope_freqs.weight must hold divisors of at least 1 and the rotary base"
            f" exceed 1 (it is {theta}); fetch the file again"
        )
    turns = theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    for high, original in _candidates(divisors, turns, factor):
        if np.allclose(divisors, _divisors(turns, factor, high, original), rtol=TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{where}: rope_freqs.weight fits no llama3 scaling; use the Hugging Face folder instead"
    )


def _candidates(divisors: np.ndarray, turns: np.ndarray, factor: float) -> list[tuple[float, int]]:
    """Published settings first, then what the divisors between the ends determine."""
    found = [(4.0, 8192)]
    if factor <= 1.0:
        return found
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # 0 long, 1 short wavelengths
    between = (share > 0.01) & (share < 0.99)
    if between.sum() >= 2:
        slope, offset = np.polyfit(turns[between], share[between], 1)
        if offset < 0:
            high = round(1 - 1 / offset, 3)
            found.append((high, round(-slope / offset)))
    elif between.sum() == 1:
        found.append((4.0, round(float((3 * share[between][0] + 1) / turns[between][0]))))
    else:
        longest_kept = turns[share >= 0.99].min(initial=np.inf)
        found.append((4.0, math.ceil(4 / longest_kept)))
    return found


def _divisors(turns: np.ndarray, factor: float, high: float, original: float) -> np.ndarray:
    share = np.clip((original * turns - 1) / (high - 1), 0, 1)
    return 1 / (share + (1 - share) / factor)
