"""Segments of a row: what is taken out is put back, whatever a cache is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.compiler import jit
from dflash_jax.decode.inputs import SegmentInputs
from dflash_jax.decode.rows import put_segment, take_segment
from dflash_jax.state import DecodeState, LayerCache, empty_cache

CHUNK, SLOTS, START = 4, 16, 8


def random_cache(dtype: str, *, ring: bool) -> LayerCache:
    """Two rows of noise."""
    cache, rng = empty_cache(2, 3, SLOTS, 5, dtype=jnp.dtype(dtype), ring=ring), iter(range(9))

    def fill(x: jax.Array) -> jax.Array:
        noise = np.random.default_rng(next(rng)).integers(-99, 99, x.shape)
        return jnp.asarray(noise).astype(x.dtype)

    return jax.tree.map(fill, cache)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("ring", [False, True])
def test_a_segment_carries_every_array_of_a_cache(dtype: str, ring: bool) -> None:
    cache, blank = (
        random_cache(dtype, ring=ring),
        empty_cache(2, 3, SLOTS, 5, dtype=dtype, ring=ring),
    )
    position = jnp.zeros(2, jnp.int32)
    full, empty = (DecodeState((c,), (), position, position) for c in (cache, blank))
    start = START + SLOTS * ring  # a ring that went round
    where = jnp.int32(start)
    taken = SegmentInputs(row=jnp.int32(0), start=where)
    segment = jit(functools.partial(take_segment, chunk=CHUNK))(full, taken)
    made = put_segment(empty, SegmentInputs(jnp.int32(1), where, segment), chunk=CHUNK)
    assert made.position.tolist() == [0, start + CHUNK]
    places = slice(START, START + CHUNK)
    assert len(segment.target[0]) == (4 if dtype == "int8" else 2)
    for got, wanted in zip(*map(jax.tree.leaves, (made.target, full.target)), strict=True):
        np.testing.assert_array_equal(got[1, :, places], wanted[0, :, places])
        assert (np.delete(np.asarray(got[1]), places, axis=1) == 0).all()
        assert (np.asarray(got[0]) == 0).all()
