"""State of a row: segments are put back as they were taken, and a new request starts afresh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.graph.build import jit
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.decoding import update_drafter
from dflash_jax.graph.steps.inputs import SegmentInputs, UpdateDrafterInputs
from dflash_jax.graph.steps.pair import Observed
from dflash_jax.graph.steps.rows import put_segment, take_segment
from dflash_jax.kernels.caches import LayerCache, empty_cache
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

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


def test_the_context_of_a_new_request_does_not_depend_on_the_row_s_past() -> None:
    """Of a drafter on a device of its own."""
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    engine = random_engine(target, drafter, Plan(max_length=32, chunk=CHUNK, block=2))
    pair = build_pair(engine.graph.config, engine.graph.drafter_config)
    tap = jax.random.normal(jax.random.key(0), (1, CHUNK, target.hidden_size))
    end, fresh = jnp.array([CHUNK]), jnp.array([True])
    observed = Observed(jnp.zeros((1, CHUNK), jnp.int32), (tap,) * len(pair.taps))
    inputs = UpdateDrafterInputs(observed, fresh, ~fresh, end, anchor=end)
    update = jit(functools.partial(update_drafter, pair))
    first, later = (
        dataclasses.replace(engine.core.runner.state, target=(), position=jnp.array([at]))
        for at in (0, 7)
    )
    new, again = (update(engine.params, state, None, inputs)[0] for state in (first, later))
    assert again.position.tolist() == new.position.tolist() == [CHUNK]
    for ours, theirs in zip(*map(jax.tree.leaves, (again.drafter, new.drafter)), strict=True):
        np.testing.assert_array_equal(ours[:, :, :CHUNK], theirs[:, :, :CHUNK])
        assert ours[:, :, :CHUNK].any()
