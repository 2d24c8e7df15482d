"""Rounding of norms and contractions, and gradients of products."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from dflash_jax.nn.layers import dot, halves, product, rms_norm

WIDTH = 16


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_norm_rounds_before_it_multiplies_by_its_weight(seed: int) -> None:
    """The rounding of Llama, Qwen3 and DFlash: to bfloat16, then times the bfloat16 weight."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, WIDTH)) * 3).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal(WIDTH).astype(ml_dtypes.bfloat16)
    got = rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-6, "xla")
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
    """On these numbers, multiplying in float32 first would change many results."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, WIDTH)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal(WIDTH).astype(ml_dtypes.bfloat16)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-6, "xla"), np.float32)
    x32 = x.astype(np.float32)
    normed = x32 / np.sqrt((x32**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    late = (normed * w.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    early = normed.astype(ml_dtypes.bfloat16).astype(np.float32) * w.astype(np.float32)
    early = early.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (early != late).mean() > 0.1
    assert (got != early).mean() < 0.01


def test_contractions_of_bfloat16_accumulate_in_float32() -> None:
    """A bfloat16 accumulator would stop at 256 of 4096 ones."""
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 2), jnp.bfloat16)
    out = dot(x, w)
    assert out.dtype == jnp.bfloat16
    assert out.tolist() == [[4096.0, 4096.0]]


def test_a_norm_of_float16_values_whose_squares_overflow_float16() -> None:
    x = jnp.full((1, WIDTH), 300.0, jnp.float16)
    out = rms_norm(x, jnp.ones((WIDTH,), jnp.float16), 1e-6, "xla")
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=1e-3)


PRODUCTS = [
    ("abc,cA->abA", (2, 3, 4), (4, 5)),
    ("abc,cAB->abAB", (2, 3, 4), (4, 2, 5)),
    ("bkqh,bksh->bkqs", (2, 1, 3, 4), (2, 1, 5, 4)),
    ("bntkgh,bskh->bkgnts", (2, 2, 3, 1, 2, 4), (2, 5, 1, 4)),
]


def slopes(multiply, letters: str, x: jax.Array, y: jax.Array):
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(multiply(letters, x, y)).sum()

    return jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, y), jax.grad(loss, (0, 1))(x, y)


@pytest.mark.parametrize(("letters", "left", "right"), PRODUCTS)
def test_the_gradient_of_a_product_is_that_of_the_einsum(letters, left, right) -> None:
    x, y = jax.random.normal(jax.random.key(0), left), jax.random.normal(jax.random.key(1), right)
    found, wanted = slopes(product, letters, x, y)[1], slopes(jnp.einsum, letters, x, y)[1]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_of_16_bit_products_multiply_16_bits() -> None:
    """By default they would multiply a float32 gradient and a weight widened to float32."""
    letters, left, right = PRODUCTS[0]
    x, y = jnp.ones(left, jnp.bfloat16), jnp.ones(right, jnp.bfloat16)
    traced, found = slopes(product, letters, x, y)
    assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
    assert dtypes_multiplied(traced.jaxpr) == [jnp.bfloat16] * 6


def dtypes_multiplied(jaxpr) -> list:
    """Return the dtypes of the factors of every product in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found += [x.aval.dtype for x in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            found += dtypes_multiplied(inner)
    return found


def test_gradients_of_halves_are_those_of_slices() -> None:
    both = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 5)), jnp.float32)

    def gated(cut, x):
        first, second = cut(x)
        return (jnp.tanh(first) * second).sum()

    sliced = jax.grad(lambda x: gated(lambda y: (y[..., 0, :], y[..., 1, :]), x))(both)
    np.testing.assert_array_equal(jax.grad(lambda x: gated(halves, x))(both), sliced)
