"""Settings of training tests: optax needs jax's standard dtype promotion."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def usual_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
