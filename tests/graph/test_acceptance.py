"""Acceptance and cuts against loops over tokens."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.graph.build import jit
from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps.acceptance import accept, cut, is_stop, stops_masked

B, T, E, V = 4, 5, 3, 7
ACCEPT, CUT = jit(accept), jit(cut)
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
def test_what_is_accepted_is_the_longest_prefix_the_target_would_have_said(
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


def test_drafts_that_do_not_count_are_as_if_never_made() -> None:
    block, best = jnp.asarray([[7, 1, 2, 3]] * 4), jnp.asarray([[1, 2, 3, 4]] * 4)
    assert accept(block, best, jnp.asarray([0, 1, 2, 3])).tolist() == [1, 2, 3, 4]
