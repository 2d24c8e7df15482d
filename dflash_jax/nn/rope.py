"""Rotary position embeddings with half-split pairs, absolute positions and float32 angles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.config import RopeConfig
from dflash_jax.kernels.native.layers import rotate_pairs
from dflash_jax.kernels.selection import kernels


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Return the angular frequency of each pair, float32 [dim/2] (formulas of transformers 5)."""
    base = 1.0 / _stretched(rope, dim) ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "proportional":  # the other pairs are not rotated
        turning = np.arange(dim // 2) < int(rope.partial_rotary_factor * dim // 2)
        return (base * turning / rope.factor).astype(np.float32)
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((rope.original_length / wavelength - low) / (high - low), 0.0, 1.0)
        return (base * smooth + base / rope.factor * (1 - smooth)).astype(np.float32)
    if rope.kind == "yarn":
        ramp = _yarn_ramp(rope, dim)
        return (base * (1 - ramp) + base / rope.factor * ramp).astype(np.float32)
    if rope.kind == "longrope":
        divisors = rope.long_factors if rope.length else rope.short_factors
        return np.divide(base, divisors).astype(np.float32)
    return base.astype(np.float32)


def _stretched(rope: RopeConfig, dim: int) -> float:
    """Return the base, enlarged by dynamic scaling for texts beyond the original length."""
    if rope.kind != "dynamic" or not rope.length:
        return rope.theta
    times = rope.factor * rope.length / rope.original_length - (rope.factor - 1)
    return rope.theta * times ** (dim / (dim - 2))


def _yarn_ramp(rope: RopeConfig, dim: int) -> np.ndarray:
    """Return 0 for pairs that keep their frequency, 1 for fully rescaled ones, [dim/2]."""

    def pair_turning(turns: float) -> float:
        reach = rope.original_length / (turns * 2 * math.pi)
        return dim * math.log(reach) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = (last - first) or 0.001
    return np.clip((np.arange(dim // 2) - first) / span, 0.0, 1.0)


def rope_tables(
    rope: RopeConfig, dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return cos and sin of every pair's angle, float32, times the attention factor."""
    frequencies = jnp.asarray(inverse_frequencies(rope, dim))
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate_leading(
    x: Float[Array, "B T *heads H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    neighbours: bool = False,
) -> Float[Array, "B T *heads H"]:
    """Rotate the first 2 * half dimensions of each head and keep the others.

    Args:
      neighbours: pairs are (2m, 2m + 1). The result has their first halves first, which products
        of queries and keys do not depend on.
    """
    size = 2 * cos.shape[-1]
    first, rest = x[..., :size], x[..., size:]
    if neighbours:
        pairs = first.reshape(*first.shape[:-1], size // 2, 2)
        first = jnp.swapaxes(pairs, -1, -2).reshape(first.shape)
    turned = rotate(first, cos, sin)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T *heads H"]:
    """Rotate pairs (m, m + H/2) of x; cos and sin are rounded to x's dtype first."""
    if kernels() == "native":
        return rotate_pairs(x, cos.astype(x.dtype), sin.astype(x.dtype)).astype(x.dtype)
    shape = (*cos.shape[:2], *(1,) * (x.ndim - 3), 1, cos.shape[2])
    cos, sin = (t.astype(x.dtype).reshape(shape) for t in (cos, sin))
    pairs = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    turned = jnp.concatenate([-sin, sin], axis=-2) * jax.lax.rev(pairs, (x.ndim - 1,))
    return (pairs * cos + turned).reshape(x.shape)
