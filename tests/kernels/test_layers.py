"""Layers by native kernels: their numbers, and tokens in any company."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.layers import (
    attend_native,
    drawn,
    gate,
    normalise,
    prepare_heads,
    softcap,
    write_native,
)
from dflash_jax.nn import layers
from dflash_jax.nn.attention import (
    Positions,
    attend,
    attend_whole,
    rotate,
    to_int8,
    write_keys_values,
)

pytestmark = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
SCALE = 0.3
ATTEND = jax.jit(functools.partial(attend_native, scale=SCALE))
WHOLE = jax.jit(functools.partial(attend_whole, scale=SCALE))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(
    tokens: int, groups: int, width: int, slots: int, dtype: str = "float32"
) -> tuple[Any, LayerCache, Any]:
    """Random queries [2, T, 3, G, H], a cache and a mask; each query sees at least one slot."""
    q = jnp.asarray(draw(2, tokens, 3, groups, width))
    k, v = (jnp.asarray(draw(2, 3, slots, width, seed=s)) for s in (1, 2))
    seen = np.random.default_rng(3).random((2, tokens, slots)) < 0.4
    seen[:, np.arange(tokens), np.arange(tokens) % slots] = True
    seen[0, :, slots // 2 :] &= tokens > slots // 2  # nobody sees the end of the first row
    seen[:, 0] = False
    seen[:, 0, slots - 1] = True
    if dtype == "int8":
        (k, k_scale), (v, v_scale) = to_int8(k), to_int8(v)
        return q, LayerCache(k, v, k_scale, v_scale), jnp.asarray(seen)
    return q, LayerCache(k.astype(dtype), v.astype(dtype)), jnp.asarray(seen)


# Tokens, groups, widths of heads, and slots.
SHAPES = (
    *((1, 1, 64, 32), (5, 3, 4, 33), (3, 2, 20, 7)),
    *((8, 5, 128, 64), (2, 1, 72, 1), (9, 1, 256, 40)),
)
DTYPES = ["float32", "bfloat16", "float16", "int8"]
# Each shape once, and each dtype with and without sinks.
CHOSEN = {(i, DTYPES[i % 4], i % 3 == 1) for i in range(6)} | {(3, dtype, True) for dtype in DTYPES}


@pytest.mark.parametrize(
    ("shape", "dtype", "sinks"),
    [
        pytest.param(
            *(SHAPES[i], dtype, sinks),
            id=f"{i}-{dtype}{'-sinks' * sinks}",
            marks=[] if (i, dtype, sinks) in CHOSEN else [pytest.mark.exhaustive],
        )
        for i, dtype, sinks in itertools.product(range(6), DTYPES, (False, True))
    ],
)
def test_attention_is_that_of_xla_over_the_slots_that_are_seen(
    shape: tuple[int, int, int, int], dtype: str, sinks: bool
) -> None:
    groups = shape[1]
    q, cache, seen = attention(*shape, dtype)
    logits = jnp.asarray(draw(3, groups, seed=4)) if sinks else None
    wanted = WHOLE(q, cache, seen, logits)
    np.testing.assert_allclose(ATTEND(q, cache, seen, logits), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_query_attends_alike_in_any_company(dtype: str) -> None:
    q, cache, seen = attention(9, 5, 40, 70, dtype)
    together = np.asarray(ATTEND(q, cache, seen, None)).reshape(2, 9, 3, 5, 40)
    for t in range(9):
        for heads in (slice(0, 1), slice(1, 5)):
            alone = ATTEND(q[:, t : t + 1, :, heads], cache, seen[:, t : t + 1], None)
            same = together[:, t, :, heads].reshape(alone[:, 0].shape)
            np.testing.assert_array_equal(alone[:, 0], same)
    one = jax.tree.map(lambda x: x[1:], (q, cache, seen))
    np.testing.assert_array_equal(ATTEND(*one, None)[0], together[1].reshape(9, -1))


@pytest.mark.parametrize("slots", [33, 48])
def test_queries_that_see_nothing_are_zeros_and_change_no_others(slots: int) -> None:
    q, cache, seen = attention(9, 5, 40, slots)
    whole = np.asarray(ATTEND(q, cache, seen, None))
    rng = np.random.default_rng(1)
    for share in (0.0, 0.2, 0.6, 1.0):
        live = rng.random((2, 9, 1)) < share
        found = np.asarray(ATTEND(q, cache, seen & live, None))
        wanted = np.where(live, whole, 0)
        np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


def test_slots_that_are_not_seen_are_not_read() -> None:
    q, cache, seen = attention(4, 2, 32, 48)
    clean = ATTEND(q, cache, seen, None)
    hidden = ~seen.any(axis=1)[:, None, :, None]
    spoilt = LayerCache(jnp.where(hidden, jnp.nan, cache.k), jnp.where(hidden, 1e30, cache.v))
    np.testing.assert_array_equal(ATTEND(q, spoilt, seen, None), clean)


def test_numbers_that_are_not_finite_reach_those_who_see_them_only() -> None:
    q, cache, _ = attention(4, 2, 32, 48)
    k, v = (jnp.swapaxes(x[:, :, :4], 1, 2) for x in (cache.k, cache.v))
    cache = write_keys_values(cache, k, v.at[:, 2].set(jnp.inf), places(4, 10, 10), "xla")
    seen = jnp.arange(48)[None, None] <= (10 + jnp.arange(4))[None, :, None]
    found = np.asarray(ATTEND(q, cache, jnp.broadcast_to(seen, (2, 4, 48)), None))
    assert np.isfinite(found[:, :2]).all()
    assert np.isnan(found[:, 2:]).all()
    q = q.at[0, 1].set(jnp.nan)
    spoilt = np.asarray(ATTEND(q, cache, jnp.broadcast_to(seen, (2, 4, 48)), None))
    assert np.isnan(spoilt[0, 1]).all()
    np.testing.assert_array_equal(spoilt[:, 0], found[:, 0])


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4])
def test_weights_are_exponentials_of_any_score(spread: float) -> None:
    """A score far below the greatest has no weight; equal ones share it."""
    scores = spread * np.array([0, -1, -80, -90, -1e4, -1e30], np.float32)
    q, k = jnp.ones((1, 1, 1, 1, 2)), np.zeros((1, 1, 6, 2), np.float32)
    k[0, 0, :, 0] = scores
    v = jnp.eye(6)[None, None, :, :]
    k = jnp.asarray(np.concatenate([k, np.zeros((1, 1, 6, 4), np.float32)], axis=3))
    q = jnp.concatenate([q, jnp.zeros((1, 1, 1, 1, 4))], axis=4)
    found = attend_native(q, LayerCache(k, v), jnp.ones((1, 1, 6), bool), None, scale=1.0)
    e = np.exp(scores.astype(np.float64) - scores.max())
    np.testing.assert_allclose(found[0, 0], e / e.sum(), rtol=5e-7, atol=1e-38)


@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 64), (1, 40, 100), (2, 2, 3, 4, 24)])
def test_norms_divide_by_the_root_of_the_mean_square(shape: tuple[int, ...]) -> None:
    x, w = draw(*shape), draw(*shape[2:], seed=1)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-5) * w
    found = jax.jit(functools.partial(normalise, eps=1e-5))(x, w)
    np.testing.assert_allclose(found, exact, rtol=2e-6)
    for b, t in np.ndindex(*shape[:2]):
        alone = jax.jit(functools.partial(normalise, eps=1e-5))(x[b : b + 1, t : t + 1], w)
        np.testing.assert_array_equal(alone[0, 0], found[b, t])


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 4, 6), (1, 30, 2, 3, 64)])
def test_rotations_turn_pairs_by_their_tokens_angle(shape: tuple[int, ...]) -> None:
    x, angle = draw(*shape), draw(*shape[:2], shape[-1] // 2, seed=1)
    cos, sin = np.cos(angle), np.sin(angle)
    found = prepare_heads(x, None, cos, sin)
    np.testing.assert_allclose(found, rotate(x, cos, sin, "xla"), atol=2e-6)
    for b, t in np.ndindex(*shape[:2]):
        only = np.s_[b : b + 1, t : t + 1]
        alone = prepare_heads(x[only], None, cos[only], sin[only])
        np.testing.assert_array_equal(alone[0, 0], found[b, t])


@functools.partial(jax.jit, donate_argnums=0)
def WRITE(cache: LayerCache, k: Any, v: Any, each: Any) -> LayerCache:
    return write_native(cache, k[..., None, :], v[..., None, :], each)


def places(width: int, *start: int) -> Positions:
    return Positions.of(jnp.array(start), width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "turned"), [(True, 20), (True, 0), (False, 12)])
def test_heads_are_read_where_a_product_wrote_them(dtype: str, normed: bool, turned: int) -> None:
    """Bit for bit as apart: norms, rotations, keys and values in the cache, and attention."""
    groups, (_, cache, seen) = 2, attention(5, 2, 20, 24, dtype)
    qkv, w = draw(2, 5, 3, groups + 2, 20), draw(groups + 1, 20, seed=1)
    angle = draw(2, 5, turned // 2, seed=2)
    cos, sin = (np.cos(angle), np.sin(angle)) if turned else (None, None)
    live = np.random.default_rng(4).random((2, 5)) < 0.6
    each = np.where(live, places(5, 3, 9).each, -1)
    q, k, v = qkv[..., :groups, :], qkv[..., groups, :], qkv[..., groups + 1, :]
    qk = qkv[..., : groups + 1, :]
    if normed:
        qk = np.asarray(normalise(qk, w, 1e-5))
    if turned:
        first = np.asarray(prepare_heads(qk[..., :turned], None, cos, sin))
        qk = np.concatenate([first, qk[..., turned:]], axis=-1)
    q, k = qk[..., :groups, :], qk[..., groups, :]
    wanted = WRITE(jax.tree.map(jnp.copy, cache), k, v, each)
    read = np.asarray(ATTEND(jnp.asarray(q), wanted, seen, None))

    @jax.jit
    def in_place(qkv: Any, cache: LayerCache) -> Any:
        norm = (w, 1e-5) if normed else None
        heads = prepare_heads(qkv, norm, cos, sin, live, count=groups + 1)
        cache = write_native(cache, heads, heads, each, key=groups, value=groups + 1)
        return attend_native(heads, cache, seen, None, live, scale=SCALE, groups=groups), cache

    found, written = in_place(np.where(live[:, :, None, None, None], qkv, np.nan), cache)
    np.testing.assert_array_equal(np.asarray(found)[live], read[live])
    jax.tree.map(np.testing.assert_array_equal, written, wanted)


def test_what_does_not_count_is_neither_read_nor_normed() -> None:
    x, w = draw(3, 5, 40), draw(40, seed=1)
    live = np.random.default_rng(4).random((3, 5)) < 0.6
    found = normalise(np.where(live[..., None], x, np.nan), w, 1e-5, live)
    np.testing.assert_array_equal(found[live], normalise(x, w, 1e-5)[live])


@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_written_in_place_as_by_xla(dtype: str, ring: bool) -> None:
    _, cache, _ = attention(1, 1, 20, 24, dtype)
    cache = dataclasses.replace(cache, ring=ring)
    k, v = draw(2, 5, 3, 20, seed=5) * 9, draw(2, 5, 3, 20, seed=6)
    v[0, 1, 2, 3], v[1, 0, 0, :] = np.inf, 0
    v[1, 4, 1, 1] = 1e6  # infinite in float16
    k[0, 3, 1, :], k[1, 2, 0, 7] = 0, np.nan
    where = places(5, 19, 22 if ring else 3)
    wanted = write_keys_values(cache, k, v, where, "xla")
    given = jax.tree.map(jnp.copy, cache)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)]
    found = WRITE(given, k, v, where.each)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)] == before
    for mine, xla in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        rounding = 1e-6 if mine.ndim == 3 else 0  # XLA divides scales by 127 otherwise
        np.testing.assert_allclose(np.float32(mine), np.float32(xla), rtol=rounding, atol=0)


def test_dead_tokens_and_those_past_the_end_of_a_cache_are_not_written() -> None:
    _, cache, _ = attention(1, 1, 20, 24)
    before = np.asarray(cache.k).copy()
    k, v = (draw(2, 40, 3, 20, seed=s) for s in (5, 6))
    each = np.array(places(40, 20, 0).each)
    each[1] = -1
    found = np.asarray(WRITE(cache, k, v, each).k)
    np.testing.assert_array_equal(found[0, :, 20:], np.swapaxes(k[0, :4], 0, 1))
    np.testing.assert_array_equal(found[0, :, :20], before[0, :, :20])
    np.testing.assert_array_equal(found[1], before[1])


@pytest.mark.parametrize("shape", [(1, 1, 2, 5), (2, 3, 2, 64), (1, 9, 2, 100)])
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_gates_are_activations_times_factors(shape: tuple[int, ...], gelu: bool) -> None:
    x = draw(*shape) * 8
    x[0, 0, 0, :4] = 0, -200, 200, -30
    first, up = x[..., 0, :].astype(np.float64), x[..., 1, :].astype(np.float64)
    inner = np.sqrt(8 / np.pi) * (first + 0.044715 * first**3) if gelu else first
    exact = first / (1 + np.exp(-np.clip(inner, -700, 700))) * up
    run = jax.jit(functools.partial(gate, gelu=gelu))
    found = np.asarray(run(x))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-30)
    for b, t in np.ndindex(*shape[:2]):
        np.testing.assert_array_equal(run(x[b : b + 1, t : t + 1])[0, 0], found[b, t])


def test_gates_of_dead_tokens_are_zeros_and_what_is_not_finite_stays_so() -> None:
    x = draw(1, 4, 2, 24)
    x[0, 1], x[0, 2, 0, 3], x[0, 3, 1, 5] = 0, np.nan, np.inf
    found = np.asarray(gate(x, gelu=False))
    assert not found[0, 1].any()
    assert np.isnan(found[0, 2, 3])
    assert np.isinf(found[0, 3, 5])
    assert np.isfinite(found).sum() == found.size - 2


@pytest.mark.parametrize("shape", [(1, 1), (3, 97), (2, 2, 70_000)])
def test_caps_are_those_of_float64_and_alike_in_any_company(shape: tuple[int, ...]) -> None:
    x = draw(*shape) * np.float32(40)
    x.flat[0] = 1e-4
    capped = np.asarray(jax.jit(functools.partial(softcap, cap=30.0))(x))
    wanted = 30 * np.tanh(x.astype(np.float64) / 30)
    np.testing.assert_allclose(capped, wanted, rtol=4e-7)
    rows = x.reshape(-1, shape[-1])
    for i, row in enumerate(rows):
        alone = np.asarray(softcap(jnp.asarray(row[None]), 30.0))
        np.testing.assert_array_equal(alone[0], capped.reshape(rows.shape)[i])
    odd = np.asarray(softcap(jnp.array([[np.nan, np.inf, -np.inf, -0.0, 3e38]]), 2.0))[0]
    np.testing.assert_array_equal(odd, [np.nan, 2, -2, 0, 2])


def test_layers_use_the_kernels_that_they_are_given() -> None:
    q, cache, seen = attention(2, 1, 16, 24)
    x = draw(1, 2, 8)

    def lowered(name: str) -> str:
        def step(q: Any, cache: Any, seen: Any, x: Any) -> Any:
            norm = layers.rms_norm(x, jnp.ones(8), 1e-6, name)
            wide = layers.rms_norm_wide(x, None, 1e-6, name)
            return attend(q, cache, seen, name), norm, wide, rotate(x, x[..., :4], x[..., 4:], name)

        return jax.jit(step).lower(q, cache, seen, x).as_text()

    assert lowered("native").count("@dflash_") == 4
    assert "@dflash_" not in lowered("xla")
    assert all(f"@dflash_{name}" in lowered("native") for name in ("attend", "norm", "heads"))


def test_native_norms_give_each_familys_rounding() -> None:
    x = jnp.asarray(draw(2, 3, 40)).astype(jnp.bfloat16)
    w = jnp.asarray(draw(40, seed=1)).astype(jnp.bfloat16)
    for norm in (layers.rms_norm, layers.rms_norm_from_one, layers.rms_norm_wide):
        wanted, found = norm(x, w, 1e-6, "xla"), norm(x, w, 1e-6, "native")
        assert found.dtype == wanted.dtype
        exact = np.asarray(wanted, np.float32)
        np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-7)
        assert (np.asarray(found, np.float32) == exact).mean() > 0.95


@pytest.mark.parametrize("wrong", ["mask", "values", "scale", "sinks"])
def test_shapes_that_do_not_fit_are_refused(wrong: str) -> None:
    q, cache, seen = attention(2, 1, 16, 24, "int8")
    assert cache.k_scale is not None
    sinks = jnp.zeros((3, 1 + (wrong == "sinks")))
    if wrong == "mask":
        seen = seen[:1]
    if wrong == "values":
        cache = cache.replace(v=cache.v[:, :, :20])
    if wrong == "scale":
        cache = cache.replace(k_scale=cache.k_scale[:, :, :20])
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        ATTEND(q, cache, seen, sinks).block_until_ready()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("wrong", ["rows", "heads", "width", "values", "positions"])
def test_keys_that_do_not_fit_a_cache_are_not_written(wrong: str, dtype: str) -> None:
    _, cache, _ = attention(1, 1, 20, 24, dtype)
    shape = {"rows": (3, 5, 3, 20), "heads": (2, 5, 4, 20), "width": (2, 5, 3, 24)}
    k = v = jnp.zeros(shape.get(wrong, (2, 5, 3, 20)))
    if wrong == "values":
        v = v[:, :4]
    each = jnp.zeros((len(k), 4 if wrong == "positions" else 5), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fit"):
        jax.block_until_ready(write_native(cache, k[..., None, :], v[..., None, :], each))


def drawn_from(
    x: jax.Array, keys: jax.Array, temperature: float = 1, value: float = -np.inf, index: int = 0
) -> np.ndarray:
    """Draw from what is kept of every row."""
    rows = len(x)
    each = [jnp.full(rows, number, jnp.float32) for number in (temperature, value)]
    return np.asarray(drawn(x, keys, jnp.ones(rows, bool), *each, jnp.full(rows, index)))


@pytest.mark.parametrize("width", [5, 128, 300])
def test_draws_have_the_distribution_of_the_softmax(width: int) -> None:
    """By chi squared, of tokens that are expected 20 times or more; others are one."""
    count = 20_000
    x = 2 * draw(width)
    x[1] = -np.inf
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), count))
    found = np.bincount(drawn_from(jnp.broadcast_to(x, (count, width)), keys), minlength=width)
    expected = count * np.exp(x - np.logaddexp.reduce(x))
    assert found[1] == 0
    often = expected >= 20
    found, expected = (np.append(a[often], a[~often].sum()) for a in (found, expected))
    squared = ((found - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(expected) - 1
    assert squared < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_a_draw_depends_on_its_row_and_key_alone() -> None:
    x = jnp.asarray(draw(9, 300))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 9))
    together = drawn_from(x, keys)
    alone = [int(drawn_from(x[i : i + 1], keys[i : i + 1])[0]) for i in range(9)]
    assert together.tolist() == alone
    assert len(set(drawn_from(x[:1].repeat(9, axis=0), keys).tolist())) > 1
    odd = jnp.full((3, 200), jnp.nan).at[1].set(-jnp.inf).at[2].set(0).at[2, 150].set(3e38)
    last = drawn_from(odd, keys[:3])
    assert ((last >= 0) & (last < 200)).all()
    assert last[2] == 150
    # What is not kept is never drawn; of equal numbers, those up to the index are kept.
    many = jax.random.key_data(jax.random.split(jax.random.key(4), 500))
    tied = jnp.zeros((500, 300)).at[:, 7].set(1)
    found = set(drawn_from(tied, many, temperature=0.5, value=0, index=4).tolist())
    assert found == {0, 1, 2, 3, 4, 7}
    assert set(drawn_from(tied, many, temperature=0.5, value=2, index=9).tolist()) == {7}
