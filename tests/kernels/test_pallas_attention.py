"""The GPU kernels, run as ordinary operations, and their lowering."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.graph.build import jit
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.pallas_attention import LEAST, attend_kernel, fits
from dflash_jax.nn.attention import attend, attend_whole, slot_positions, to_int8, visible

K, G, H = 2, 3, 16


def case(
    ends: list[int], slots: int, tokens: int, *, window: int | None = None, int8: bool = False
) -> tuple[jax.Array, LayerCache, jax.Array]:
    """Return random queries and keys, and the mask of blocks that end at these positions."""
    rng, b = np.random.default_rng(1), len(ends)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((b, tokens, K, G, H), (b, K, slots, H), (b, K, slots, H))
    )
    cache = LayerCache(k, v)
    if int8:
        (k, k_scale), (v, v_scale) = to_int8(k), to_int8(v)
        cache = LayerCache(k, v, k_scale, v_scale)
    end = jnp.asarray(ends)
    query = end[:, None] - tokens + jnp.arange(tokens)[None, :]
    seen = visible(query, slot_positions(end, slots), causal=True, window=window)
    return q, cache, seen


@pytest.mark.sample("ends1-80-8-50-False")
@pytest.mark.parametrize(
    ("ends", "slots", "tokens", "window", "int8"),
    [
        ([40, 2 * LEAST + 90], 2 * LEAST + 96, 4, None, False),  # an incomplete last piece
        ([LEAST, 700], 80, 8, 50, False),  # a ring, one of its rows wrapped
        ([2 * LEAST], 3 * LEAST, 1, 30, True),  # parts before the window are not live
    ],
)
def test_the_kernels_match_attention(
    ends: list[int], slots: int, tokens: int, window: int | None, int8: bool
) -> None:
    q, cache, seen = case(ends, slots, tokens, window=window, int8=int8)
    sinks = None if int8 else jnp.asarray([[0.5, 2.0, -1.0]] * K)
    wanted = jit(functools.partial(attend_whole, scale=0.7))(q, cache, seen, sinks)
    found = jit(functools.partial(attend_kernel, scale=0.7, interpret=True))(q, cache, seen, sinks)
    np.testing.assert_allclose(found, wanted, atol=3e-6)


def test_a_rows_bits_depend_on_its_own_slots_alone() -> None:
    """R9: neither on positions of other rows nor on slots that it does not see."""
    slots = 4 * LEAST
    run = jit(functools.partial(attend_kernel, sinks=None, scale=0.7, interpret=True))
    q, cache, seen = case([300, 40], slots, 4)
    alone = run(q, cache, seen)
    for other in (LEAST + 1, slots):
        beside = run(q, cache, case([300, other], slots, 4)[2])
        np.testing.assert_array_equal(alone[0], beside[0])
    spoilt = LayerCache(*(x.at[:, :, 320:].set(jnp.nan) for x in (cache.k, cache.v)))
    np.testing.assert_array_equal(alone, run(q, spoilt, seen))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_plans_with_kernels_attend_by_two_of_them() -> None:
    q, cache, seen = case([300], 2 * LEAST, 4)
    for kernel in (False, True):
        kernels = "pallas" if kernel else "xla"
        traced = jit(functools.partial(attend, kernels=kernels)).trace(q, cache, seen)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("__gpu$xla.gpu.triton") == 2 * kernel
        assert bool(re.search(rf"stablehlo\.dot_general.*x{2 * LEAST}x", lowered)) != kernel
    assert not fits(3, cache)
    assert not fits(64, cache)
