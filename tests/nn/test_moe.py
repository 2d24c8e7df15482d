"""Experts against a loop over tokens, and R9: a token's bits do not depend on others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.interleaved import stack_floats
from dflash_jax.kernels.native.layers import route
from dflash_jax.nn.moe import (
    ExpertWeights,
    Tiles,
    by_all,
    by_row,
    by_tile,
    gelu_gated,
    softmax_then_top,
    sort_into_tiles,
    swiglu,
    top_then_softmax,
)

NATIVE = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
FORMS = {"by_tile": by_tile, "by_all": by_all} | ({"by_row": by_row} if library() else {})


def draw(dtype: str, *, experts: int, width: int, hidden: int, bias: bool) -> ExpertWeights:
    rng = np.random.default_rng(experts)
    shapes = [(experts, width, 2, hidden), (experts, hidden, width)]
    shapes += [(experts, 2, hidden), (experts, width)] if bias else []
    return ExpertWeights(
        *(np.asarray(rng.standard_normal(s) / np.sqrt(width), jnp.dtype(dtype)) for s in shapes)
    )


def run(form: str, activation: Any = swiglu) -> Any:
    multiply = jax.jit(functools.partial(FORMS[form], activation=activation))

    def by_row(x: Any, w: ExpertWeights, *routing: Any) -> jax.Array:
        strips = {name: stack_floats(getattr(w, name)) for name in ("gate_up", "down")}
        return multiply(x, w.replace(**strips), *routing)

    return by_row if form == "by_row" else multiply


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_each_token_gets_the_weighted_sum_of_its_experts(form: str, bias: bool) -> None:
    w = draw("float32", experts=8, width=24, hidden=20, bias=bias)
    rng = np.random.default_rng(1)
    for tokens in (1, 40):
        x = rng.standard_normal((tokens, 24)).astype(np.float32)
        ids = np.stack([rng.permutation(8)[:3] for _ in range(tokens)]).astype(np.int32)
        p = rng.random((tokens, 3)).astype(np.float32)
        got = np.asarray(run(form)(x, w, ids, p))
        for n in range(tokens):
            wanted = np.zeros(24)
            for e, share in zip(ids[n], p[n], strict=True):
                gate_up = np.einsum("d,dgf->gf", x[n], np.asarray(w.gate_up[e], np.float64))
                gate_up += 0.0 if w.gate_up_bias is None else np.asarray(w.gate_up_bias[e])
                h = gate_up[0] / (1 + np.exp(-gate_up[0])) * gate_up[1]
                out = h @ np.asarray(w.down[e], np.float64)
                wanted += share * (
                    out + (0.0 if w.down_bias is None else np.asarray(w.down_bias[e]))
                )
            np.testing.assert_allclose(got[n], wanted, atol=1e-5)


@pytest.mark.skipif(not library(), reason="there are no native kernels")
@pytest.mark.parametrize("activation", [swiglu, gelu_gated, lambda gate, up: (up + 1) * gate])
@pytest.mark.parametrize("bias", [False, True])
def test_dead_tokens_get_zeros_and_change_no_others(bias: bool, activation: Any) -> None:
    w = draw("float32", experts=4, width=24, hidden=20, bias=bias)
    rng = np.random.default_rng(6)
    x = rng.standard_normal((9, 24)).astype(np.float32)
    ids = np.stack([rng.permutation(4)[:2] for _ in x]).astype(np.int32)
    p = rng.random((9, 2)).astype(np.float32)
    live = np.array([1, 1, 0, 1, 0, 0, 1, 1, 0], bool)[:, None]
    multiply = run("by_row", activation)
    whole = np.asarray(multiply(x, w, ids, p))
    found = np.asarray(multiply(np.where(live, x, 0), w, ids, p))
    np.testing.assert_array_equal(found, np.where(live, whole, 0))
    other = np.asarray(run("by_tile", activation)(x, w, ids, p))
    np.testing.assert_allclose(whole, other, atol=1e-5)


def test_tiles_hold_every_choice_once_for_any_routing() -> None:
    rng, sort = (
        np.random.default_rng(2),
        jax.jit(lambda *x: vars(sort_into_tiles(*x)), static_argnums=1),
    )
    for experts, tokens, count in ((4, 1, 1), (8, 30, 2), (4, 64, 4), (128, 16, 8), (6, 50, 1)):
        for routing in ("even", "one"):
            chosen = [rng.permutation(experts)[:count] for _ in range(tokens)]
            if routing == "one":  # all tokens to the same experts
                chosen = [np.arange(experts - count, experts)] * tokens
            ids = np.stack(chosen).astype(np.int32)
            tiles = Tiles(**sort(ids, experts))
            places, rows = np.asarray(tiles.places), np.asarray(tiles.tokens)
            assert len(set(places.flat)) == ids.size
            assert (rows[places] == np.arange(tokens)[:, None]).all()
            owner = np.searchsorted(np.asarray(tiles.ends), places // tiles.height, side="right")
            assert (owner == ids).all()
            assert int(tiles.ends[-1]) * tiles.height <= len(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("experts", "count", "width", "hidden", "tokens"),
    [(8, 2, 64, 48, 48), (32, 4, 72, 40, 12), (64, 8, 48, 16, 40)],
)
def test_bits_of_a_token_do_not_depend_on_its_row_or_companions(
    dtype: str, form: str, experts: int, count: int, width: int, hidden: int, tokens: int
) -> None:
    """R9, for routings from even to all tokens on the same experts."""
    w = draw(dtype, experts=experts, width=width, hidden=hidden, bias=True)
    rng = np.random.default_rng(3)
    multiply = run(form)
    same = rng.standard_normal(width)
    ids = rng.permutation(experts)[:count].astype(np.int32)
    p = rng.random(count).astype(np.float32)
    seen = set()
    for trial in range(8):
        x = rng.standard_normal((tokens, width)) * 10.0 ** rng.integers(-2, 3)
        others = np.stack([rng.permutation(experts)[:count] for _ in range(tokens)])
        crowd = rng.random(tokens) < (trial % 4) / 3  # share of tokens with the same experts
        others[crowd] = ids
        shares = rng.random((tokens, count)).astype(np.float32)
        row = trial * 5 % tokens
        x[row], others[row], shares[row] = same, ids, p
        out = multiply(np.asarray(x, jnp.dtype(dtype)), w, others.astype(np.int32), shares)
        seen.add(np.asarray(out)[row].tobytes())
    assert len(seen) == 1


def test_a_non_finite_token_affects_no_other() -> None:
    w = draw("float32", experts=8, width=16, hidden=16, bias=True)
    x = np.random.default_rng(4).standard_normal((12, 16)).astype(np.float32)
    ids = np.tile(np.array([[1, 5]], np.int32), (12, 1))
    p = np.full((12, 2), 0.5, np.float32)
    for form in FORMS:
        clean = np.asarray(run(form)(x, w, ids, p))
        for bad in (np.nan, np.inf):
            broken = x.copy()
            broken[3] = bad
            out = np.asarray(run(form)(broken, w, ids, p))
            assert not np.isfinite(out[3]).any()
            np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=NATIVE)])
def test_routers_weigh_before_or_after_choosing(native: bool) -> None:
    logits = np.random.default_rng(5).standard_normal((2, 3, 8)).astype(np.float32)
    soft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-logits, axis=-1)[..., :2]
    chosen = np.take_along_axis(soft, best, -1)
    for normalise, wanted in ((False, chosen), (True, chosen / chosen.sum(-1, keepdims=True))):
        ids, p = softmax_then_top(jnp.asarray(logits), 2, normalise=normalise, native=native)
        np.testing.assert_array_equal(ids, best)
        np.testing.assert_allclose(p, wanted, rtol=1e-6)
    ids, p = top_then_softmax(jnp.asarray(logits), 2, native=native)
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(p, chosen / chosen.sum(-1, keepdims=True), rtol=1e-6)
    ids, _ = top_then_softmax(jnp.zeros((1, 1, 8)), 3, native=native)
    assert ids.tolist() == [[[0, 1, 2]]]  # ties: the lowest number first


@NATIVE
@pytest.mark.parametrize(("experts", "count"), [(4, 4), (8, 8), (60, 4), (5, 1)])
@pytest.mark.parametrize("chosen_only", [False, True])
def test_a_token_is_routed_alike_in_any_company(
    experts: int, count: int, chosen_only: bool
) -> None:
    """JAX 0.12's softmax over four or eight numbers depends on the number of rows."""
    logits = np.random.default_rng(6).standard_normal((40, experts)).astype(np.float32) * 3
    together = route(jnp.asarray(logits), count, chosen_only=chosen_only)
    for first, last in ((0, 1), (1, 3), (3, 7), (7, 20), (20, 40)):
        some = route(jnp.asarray(logits[first:last]), count, chosen_only=chosen_only)
        for part, whole in zip(some, together, strict=True):
            np.testing.assert_array_equal(part, whole[first:last])


@NATIVE
def test_a_router_survives_logits_that_are_not_finite() -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1] = np.nan
    logits[2, 3] = np.inf
    logits[3, 0] = np.nan
    ids, shares = route(jnp.asarray(logits), 3, chosen_only=True)
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 8 for row in ids.tolist())
    assert np.isfinite(shares[0]).all()
    assert not np.isfinite(shares[1:]).all(axis=1).any()
