"""Where norms and contractions round."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.nn.layers import dot, rms_norm

WIDTH = 16


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_norm_rounds_before_it_multiplies_by_its_weight(seed: int) -> None:
    """The rounding of Llama, Qwen3 and DFlash: to bfloat16, then times the bfloat16 weight."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, WIDTH)) * 3).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal(WIDTH).astype(ml_dtypes.bfloat16)
    got = rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-6)
    x32 = x.astype(np.float32)
    normed = x32 / np.sqrt((x32**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    rounded = normed.astype(ml_dtypes.bfloat16)
    wanted = (rounded.astype(np.float32) * w.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert got.dtype == jnp.bfloat16
    # A last-bit difference of the float32 root may tip a rounding; two such steps may not.
    ulp = np.abs(wanted.astype(np.float32)) * 2**-7
    off = np.asarray(got, np.float32) != wanted.astype(np.float32)
    assert off.mean() < 0.05
    assert (np.abs(np.asarray(got, np.float32) - wanted.astype(np.float32)) <= ulp).all()


def test_the_order_of_rounding_shows_in_bfloat16() -> None:
    """On these numbers, multiplying in float32 first would give other bits in many places."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, WIDTH)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal(WIDTH).astype(ml_dtypes.bfloat16)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-6), np.float32)
    x32 = x.astype(np.float32)
    normed = x32 / np.sqrt((x32**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    late = (normed * w.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    early = normed.astype(ml_dtypes.bfloat16).astype(np.float32) * w.astype(np.float32)
    early = early.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (early != late).mean() > 0.1
    assert (got != early).mean() < 0.01


def test_contractions_of_bfloat16_accumulate_in_float32() -> None:
    """4096 ones: a bfloat16 accumulator would stall at 256."""
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 2), jnp.bfloat16)
    out = dot(x, w)
    assert out.dtype == jnp.bfloat16
    assert out.tolist() == [[4096.0, 4096.0]]


def test_a_norm_of_float16_values_whose_squares_overflow_float16() -> None:
    x = jnp.full((1, WIDTH), 300.0, jnp.float16)
    out = rms_norm(x, jnp.ones((WIDTH,), jnp.float16), 1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=1e-3)
