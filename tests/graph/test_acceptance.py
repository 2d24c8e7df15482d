"""Acceptance and cuts against loops over tokens, and rejection against the official vectors."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dflash_jax.graph.build import jit
from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps.acceptance import (
    accept_greedy,
    accept_sampled,
    cut,
    is_stop,
    stops_masked,
)

B, T, E, V = 4, 5, 3, 7
ACCEPT, CUT = jit(accept_greedy), jit(cut)
tokens = st.lists(st.integers(0, V - 1), min_size=B * T, max_size=B * T)
stop_sets = st.lists(st.sets(st.integers(0, V - 1), max_size=E), min_size=B, max_size=B)


def rules(stops: list[set[int]], limit: Any = 1000) -> RowRules:
    ids = np.full((B, E), -1, np.int32)
    for row, stop in zip(ids, stops, strict=True):
        row[: len(stop)] = sorted(stop)
    return RowRules(
        stop_ids=jnp.asarray(ids),
        limit=jnp.asarray(np.broadcast_to(np.array(limit, np.int32), (B,))),
        max_drafts=jnp.asarray(np.full((B,), T - 1, np.int32)),
        temperature=jnp.asarray(np.zeros((B,), np.float32)),
        top_k=jnp.asarray(np.zeros((B,), np.int32)),
        top_p=jnp.asarray(np.ones((B,), np.float32)),
        min_p=jnp.asarray(np.zeros((B,), np.float32)),
        seed=jnp.asarray(np.zeros((B, 2), np.uint32)),
    )


@settings(max_examples=100, deadline=None)
@given(tokens, st.lists(st.integers(0, T), min_size=B, max_size=B))
def test_greedy_acceptance_is_the_longest_prefix_the_target_would_have_said(
    block: list[int], right: list[int]
) -> None:
    fed = np.array(block, np.int32).reshape(B, T)
    best = np.roll(fed, -1, axis=1)
    for row, places in zip(best, right, strict=True):
        row[places:] = (row[places:] + 1) % V  # wrong from there on, the last place counts for none
    n = np.asarray(ACCEPT(fed, best))
    for b in range(B):
        accepted = 0
        while accepted < T - 1 and fed[b, accepted + 1] == best[b, accepted]:
            accepted += 1
        assert n[b] == 1 + accepted == 1 + min(right[b], T - 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, T), min_size=B, max_size=B),
    tokens,
    st.lists(st.integers(0, V - 1), min_size=B, max_size=B),
    st.lists(st.integers(0, 20), min_size=B, max_size=B),
    st.lists(st.integers(0, 24), min_size=B, max_size=B),
    stop_sets,
)
def test_the_cut_stops_at_stop_tokens_and_limits_and_freezes_ended_rows(
    n: list[int],
    new: list[int],
    anchor: list[int],
    position: list[int],
    limit: list[int],
    stops: list[set[int]],
) -> None:
    decided = np.array(new, np.int32).reshape(B, T)
    columns = (np.array(x, np.int32) for x in (n, decided, anchor, position))
    kept = np.asarray(CUT(*columns, rules(stops, limit)))
    for b in range(B):
        wanted = 0
        total = position[b] + 1  # committed tokens and the anchor
        if anchor[b] not in stops[b]:
            for token in decided[b, : n[b]]:
                if total >= limit[b]:
                    break
                wanted, total = wanted + 1, total + 1
                if token in stops[b]:
                    break
        assert kept[b] == wanted
        assert kept[b] == 0 or total <= limit[b]


def test_a_stop_token_past_the_accepted_prefix_does_not_cut() -> None:
    new = jnp.asarray([[1, 2, 3, 4, 5]] * B, jnp.int32)
    n = jnp.asarray([2, 3, 4, 5], jnp.int32)
    zero = jnp.zeros((B,), jnp.int32)
    assert cut(n, new, zero, zero, rules([{3}] * B)).tolist() == [2, 3, 3, 3]


def test_padding_of_the_stop_set_matches_no_token() -> None:
    block = jnp.asarray([[-1, 0, 1, 2, 3]] * B, jnp.int32)
    stops = is_stop(block[:, 1:], rules([set(), {0}, {3}, {1, 2}]))
    assert stops.tolist() == [
        [False, False, False, False],
        [True, False, False, False],
        [False, False, False, True],
        [False, True, True, False],
    ]


@settings(max_examples=60, deadline=None)
@given(stop_sets, st.integers(0, 2**32 - 1))
def test_masking_the_stop_set_touches_nothing_else(stops: list[set[int]], seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((B, 2, V)).astype(np.float32)
    masked = np.asarray(stops_masked(jnp.asarray(logits), rules(stops)))
    for b, t, v in np.ndindex(B, 2, V):
        assert masked[b, t, v] == (-np.inf if v in stops[b] else logits[b, t, v])


@pytest.fixture(scope="module")
def official(oracle: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    path = oracle / "drafters" / "sampling"
    meta = json.loads((path / "meta.json").read_text())
    return meta["rejections"], load_file(path / "vectors.safetensors")


def test_rejection_sampling_follows_the_official_vectors(
    official: tuple[list[dict[str, Any]], dict[str, np.ndarray]],
) -> None:
    """All cases as the rows of one call, so that rows are proven independent too."""
    cases, v = official

    def rows(name: str) -> jnp.ndarray:
        return jnp.concatenate([v[f"rejection.{c['index']}.{name}"] for c in cases])

    n, rest = accept_sampled(
        rows("draft_tokens"), rows("draft_probs"), rows("target_probs"), rows("uniforms")
    )
    assert (n - 1).tolist() == [c["accepted"] for c in cases]
    assert {c["accepted"] for c in cases} == {0, 1, 2, 3, 4, 5}
    wanted = np.stack([v[f"rejection.{c['index']}.bonus_probs"] for c in cases])
    np.testing.assert_allclose(rest, wanted, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_rejection_sampling_is_the_textbook_loop(seed: int, sparse: bool) -> None:
    rng = np.random.default_rng(seed)

    def distributions(places: int) -> np.ndarray:
        p = rng.random((B, places, V)) ** 3
        if sparse:
            p[rng.random(p.shape) < 0.5] = 0
            p[..., 0] += 0.01
        return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)

    q, p = distributions(T - 1), distributions(T)
    if seed % 3 == 0:
        p[:, : T - 1] = q  # everything passes, nothing is left of any residual
    drafts = np.array(
        [[rng.choice(V, p=d / d.sum()) for d in row.astype(np.float64)] for row in q], np.int32
    )
    uniforms = rng.random((B, T - 1)).astype(np.float32)
    n, rest = accept_sampled(*map(jnp.asarray, (drafts, q, p, uniforms)))
    for b in range(B):
        accepted = 0
        while accepted < T - 1:
            d = drafts[b, accepted]
            if not uniforms[b, accepted] * q[b, accepted, d] < p[b, accepted, d]:
                break
            accepted += 1
        assert n[b] == accepted + 1
        wanted = p[b, accepted]
        if accepted < T - 1:
            left = np.maximum(p[b, accepted] - q[b, accepted], 0)
            wanted = left / left.sum() if left.sum() > 0 else wanted
        np.testing.assert_allclose(rest[b], wanted, atol=1e-5)


def test_a_draft_of_probability_zero_under_the_target_never_passes() -> None:
    """u = 0 is a possible draw: strictly less keeps 0 < 0 out."""
    q = np.zeros((B, T - 1, V), np.float32)
    q[..., 2] = 1
    p = np.zeros((B, T, V), np.float32)
    p[..., 3] = 1
    drafts = np.full((B, T - 1), 2, np.int32)
    zeros = np.zeros((B, T - 1), np.float32)
    n, rest = accept_sampled(*map(jnp.asarray, (drafts, q, p, zeros)))
    assert n.tolist() == [1] * B
    np.testing.assert_array_equal(rest, p[:, 0])
