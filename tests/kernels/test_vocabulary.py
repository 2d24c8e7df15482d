"""Reductions of a long axis: the largest values against a stable sort, by all kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.vocabulary import CHUNK, all_finite, argmax, top_k

KERNELS = ["xla"] if not library() else ["xla", "native"]


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("size", [3, 130, 64 * CHUNK, 70 * CHUNK + 5])
@pytest.mark.parametrize("kind", ["normal", "few values", "masked"])
def test_the_largest_values_are_those_of_a_stable_sort(count: int, size: int, kind: str) -> None:
    x = np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32)
    if kind == "few values":
        x = np.round(x * 4) / 4 + 0.0
    if kind == "masked":
        x = np.where(np.arange(size) % 3 > 0, x, -np.inf)
    values, ids = top_k(jnp.asarray(x), count)
    order = np.argsort(-x, kind="stable", axis=-1)[..., :count]
    finite = np.isfinite(np.take_along_axis(x, order, axis=-1))
    np.testing.assert_array_equal(np.where(finite, ids, 0), np.where(finite, order, 0))
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=-1))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16, 97, 4_099])
def test_the_likeliest_is_the_first_of_the_largest(kernels: str, dtype: type, size: int) -> None:
    scores = np.random.default_rng(7).standard_normal((4, 5, size)).astype(np.float32)
    scores[0, 0], scores[1, 0], scores[1, 1, size // 2] = 0.0, -np.inf, np.inf
    scores[0, 1, [size // 3, -1]] = 9.0
    scores[0, 2], scores[0, 3], scores[0, 4] = -1.0, np.arange(size), -np.arange(size)
    scores[1, 2] = np.where(np.arange(size) % 2, 0.0, -0.0)
    x = jnp.asarray(scores).astype(dtype)
    broken = x.at[2, :, size // 2].set(jnp.nan).at[3, 0].set(jnp.nan)
    best, some, finite = argmax(x, kernels), argmax(broken, kernels), all_finite(broken, kernels)
    np.testing.assert_array_equal(best, jnp.argmax(x, axis=-1))
    np.testing.assert_array_equal(finite, np.isfinite(broken).all(axis=-1))
    np.testing.assert_array_equal(some[:2], best[:2])
    assert ((some >= 0) & (some < size)).all()


def test_what_computes_scores_is_not_repeated_in_each_reduction() -> None:
    """Rounded otherwise in one of the two, no score would equal the largest."""
    capped = jax.jit(lambda x: argmax(30.0 * jnp.tanh(x / 30.0), "xla"))
    lowered = capped.lower(jnp.zeros((2, 8, 97)))
    assert lowered.as_text().count("optimization_barrier") == 1
