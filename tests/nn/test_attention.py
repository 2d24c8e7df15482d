"""Masks and cache writes against loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.graph.build import jit
from dflash_jax.kernels.caches import LayerCache, empty_cache
from dflash_jax.nn.attention import (
    PIECE,
    Positions,
    attend,
    attend_pieces,
    attend_whole,
    slot_positions,
    to_int8,
    visible,
    write_keys_values,
)

B, T, S, K, H = 2, 3, 8, 2, 4


@jit
def write(cache: LayerCache, k: Any, v: Any, start: Any) -> LayerCache:
    return write_keys_values(cache, k, v, Positions.of(start, k.shape[1]), "xla")


WHOLE, PIECES = (jit(functools.partial(f, scale=0.7)) for f in (attend_whole, attend_pieces))
starts = st.lists(st.integers(0, 40), min_size=B, max_size=B)


@settings(max_examples=60, deadline=None)
@given(
    starts,
    st.lists(st.integers(-3, 45), min_size=B * S, max_size=B * S),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_a_query_sees_what_the_definition_says(
    start: list[int], keys: list[int], causal: bool, window: int | None
) -> None:
    query = np.array(start)[:, None] + np.arange(T)[None, :]
    key = np.array(keys).reshape(B, S)
    seen = visible(jnp.asarray(query), jnp.asarray(key), causal=causal, window=window)
    for b, t, s in np.ndindex(B, T, S):
        i, j = query[b, t], key[b, s]
        wanted = j >= 0
        if causal:
            wanted = wanted and j <= i
        if window is not None:
            wanted = wanted and i - j < window and (causal or j - i < window)
        assert bool(seen[b, t, s]) == wanted, (i, j)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=B, max_size=B))
def test_a_slot_holds_the_newest_position_that_maps_to_it(end: list[int]) -> None:
    held = np.asarray(slot_positions(jnp.asarray(end), S))
    for b in range(B):
        written = [-1] * S
        for position in range(end[b]):
            written[position % S] = position
        for s in range(S):
            assert held[b, s] == written[s] or (held[b, s] < 0 and written[s] < 0)


@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
@pytest.mark.parametrize("width", [1, T])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_land_at_their_positions_and_hide_nothing_before_them(
    ring: bool, width: int, data: st.DataObject
) -> None:
    room = 30 if ring else S - T  # a plain cache has spare slots for the widest call
    start = np.array(data.draw(st.lists(st.integers(0, room), min_size=B, max_size=B)), np.int32)
    old = np.arange(B * K * S * H, dtype=np.float32).reshape(B, K, S, H)
    cache = LayerCache(k=jnp.asarray(old), v=jnp.asarray(-old), ring=ring)
    k = 1000 + np.arange(B * width * K * H, dtype=np.float32).reshape(B, width, K, H)
    new = write(cache, k, -k, start)
    assert new.ring == ring
    wanted, certain = old.copy(), np.ones((B, S), bool)
    for b in range(B):
        for t in range(width):
            wanted[b, :, (start[b] + t) % S] = k[b, t]
        if width == 1:  # a copy of a single row is written to the next, unused slot
            certain[b, (start[b] + 1) % S] = False
    for got, sign in ((new.k, 1), (new.v, -1)):
        same = (np.asarray(got) == sign * wanted).all(axis=(1, 3))
        assert (same | ~certain).all()


def test_rows_are_cast_to_the_dtype_of_the_cache() -> None:
    cache = empty_cache(1, K, S, H, dtype=jnp.bfloat16)
    rows = jnp.full((1, T, K, H), 1.001, jnp.float32)
    new = write(cache, rows, rows, jnp.array([2]))
    assert new.k.dtype == new.v.dtype == jnp.bfloat16
    assert new.k[0, 0, 2, 0] == jnp.bfloat16(1.001)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_attention_is_softmax_over_the_visible_keys_of_the_right_head(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = 3
    q = rng.standard_normal((B, T, K, groups, H)).astype(np.float32)
    k, v = rng.standard_normal((2, B, K, S, H)).astype(np.float32)
    seen = rng.random((B, T, S)) < 0.5
    seen[:, :, 0] = True
    k[~seen.any(axis=1)[:, None].repeat(K, axis=1)] = 1e6  # masked for all queries
    cache = LayerCache(k=jnp.asarray(k), v=jnp.asarray(v))
    out = attend(jnp.asarray(q), cache, jnp.asarray(seen), "xla").reshape(B, T, K * groups, H)
    for b, t, head in np.ndindex(B, T, K * groups):
        scores = k[b, head // groups] @ q[b, t, head // groups, head % groups] / np.sqrt(H)
        weights = np.exp(scores[seen[b, t]] - scores[seen[b, t]].max())
        wanted = weights / weights.sum() @ v[b, head // groups][seen[b, t]]
        np.testing.assert_allclose(out[b, t, head], wanted, atol=1e-5)


def random_attention(slots: int, seed: int = 0) -> tuple[jax.Array, LayerCache]:
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((B, T, K, 3, H), (B, K, slots, H), (B, K, slots, H))
    )
    return q, LayerCache(k, v)


def seen_by(ends: list[int], slots: int, window: int | None = None) -> jax.Array:
    """Return the mask of blocks that end at these positions, one per row."""
    query = np.array(ends)[:, None] - T + np.arange(T)[None, :]
    return visible(query, slot_positions(np.array(ends), slots), causal=True, window=window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("ends", [[4, 9], [2 * PIECE, 300], [2 * PIECE + 90, 3]])
def test_attention_in_pieces_is_attention(ends: list[int], sinks: bool, window: int | None) -> None:
    slots = 2 * PIECE + 96  # the last piece is incomplete
    q, cache = random_attention(slots)
    logits = jnp.asarray([[0.5, 2.0, -1.0]] * K) if sinks else None
    seen = seen_by(ends, slots, window)
    np.testing.assert_allclose(
        PIECES(q, cache, seen, logits), WHOLE(q, cache, seen, logits), atol=2e-6
    )


def test_a_call_that_fills_its_buffer_can_be_differentiated() -> None:
    slots = 2 * PIECE + 16
    k = jnp.ones((1, 1, slots, 2))
    seen = visible(*(jnp.arange(slots)[None],) * 2, causal=True, window=None)

    def total(q: jax.Array) -> jax.Array:
        return attend(q, LayerCache(k, k), seen, "xla").sum()

    slope = jit(jax.grad(total))(jnp.ones((1, slots, 1, 1, 2)))
    assert np.isfinite(slope).all()


def test_a_rows_bits_do_not_depend_on_how_far_the_others_are() -> None:
    """R9: pieces after a row's last visible one do not change its bits."""
    slots = 4 * PIECE
    q, cache = random_attention(slots)
    alone = PIECES(q, cache, seen_by([40, 40], slots), None)
    for other in (41, PIECE + 1, 3 * PIECE, 4 * PIECE):
        beside = PIECES(q, cache, seen_by([40, other], slots), None)
        np.testing.assert_array_equal(alone[0], beside[0])


def test_dead_pieces_are_not_read() -> None:
    slots = 3 * PIECE
    q, cache = random_attention(slots)
    seen = seen_by([PIECE, 40], slots)
    spoilt = LayerCache(
        cache.k.at[:, :, PIECE:].set(jnp.nan), cache.v.at[:, :, PIECE:].set(jnp.nan)
    )
    np.testing.assert_array_equal(PIECES(q, spoilt, seen, None), PIECES(q, cache, seen, None))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8])
@pytest.mark.parametrize("ring", [False, True])
def test_non_finite_values_reach_only_queries_that_see_them(dtype: Any, ring: bool, bad: float):
    rng = np.random.default_rng(8)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, K, H)), jnp.float32) for _ in range(3))
    cache, start, at = empty_cache(B, K, S, H, dtype=dtype, ring=ring), jnp.array([1, 4]), T - 2
    positions = start[:, None] + jnp.arange(T)[None, :]
    seen = visible(positions, slot_positions(start + T, S), causal=True, window=T)
    clean, spoilt = (
        WHOLE(q[:, :, :, None], write(cache, k, x, start), seen, None)
        for x in (v, v.at[:, at, 1, 2].set(bad))
    )
    np.testing.assert_array_equal(spoilt[:, :at], clean[:, :at])
    assert jnp.isnan(spoilt[:, at:, H:]).all()  # of that kv head


@pytest.mark.parametrize("ring", [False, True])
def test_an_int8_cache_holds_each_row_to_half_a_step(ring: bool) -> None:
    rng = np.random.default_rng(6)
    k, v = (jnp.asarray(rng.standard_normal((B, T, K, H)), jnp.float32) for _ in range(2))
    k = k.at[0, 1].set(0)  # a scale of zero
    cache = write(empty_cache(B, K, S, H, dtype=jnp.int8, ring=ring), k, v, jnp.array([1, 4]))
    for name, rows in (("k", k), ("v", v)):
        codes, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
        assert codes.dtype == jnp.int8
        for b, start in enumerate((1, 4)):
            held = np.asarray(codes[b]) * np.asarray(scale[b])[..., None]
            held = held[:, start : start + T]
            difference = np.abs(np.swapaxes(held, 0, 1) - rows[b])
            assert (difference <= np.abs(rows[b]).max(axis=-1, keepdims=True) / 253).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_queries_attend_to_the_numbers_that_16_bits_hold(dtype: Any) -> None:
    slots = 2 * PIECE + 96
    q, cache = random_attention(slots)
    rounded = jax.tree.map(lambda x: x.astype(dtype), cache)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    assert not jnp.array_equal(wide.k, cache.k)
    seen = seen_by([300, 40], slots)
    for attention in (WHOLE, PIECES):
        found, wanted = (attention(q, held, seen, None) for held in (rounded, wide))
        np.testing.assert_array_equal(found, wanted)


def test_attention_multiplies_int8_rows_by_their_scales() -> None:
    slots = 2 * PIECE + 96
    q, cache = random_attention(slots)
    packed = {}
    for name in ("k", "v"):
        packed[name], packed[f"{name}_scale"] = to_int8(getattr(cache, name))
    k, v = (
        packed[name].astype(jnp.float32) * packed[f"{name}_scale"][..., None] for name in ("k", "v")
    )
    seen = seen_by([300, 40], slots)
    for attention in (WHOLE, PIECES):
        found = attention(q, LayerCache(**packed), seen, None)
        wanted = attention(q, LayerCache(k, v), seen, None)
        np.testing.assert_allclose(found, wanted, atol=3e-6)
