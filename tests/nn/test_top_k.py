"""The largest values of a long axis, against a stable sort."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.nn.top_k import CHUNK, top_k


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
