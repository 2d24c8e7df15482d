"""Anchors of blocks, and the slots that count."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dflash_jax.trainer import blocks

sampled = jax.jit(blocks.sample, static_argnums=2)


def test_anchors_are_distinct_sorted_and_valid():
    valid = jnp.asarray(np.random.default_rng(0).random((3, 40)) < 0.5)
    places, alive = blocks.sample(jax.random.key(0), valid, 8)
    for row in range(3):
        chosen = np.asarray(places[row])
        assert np.asarray(alive[row]).all()
        assert (np.diff(chosen) > 0).all()
        assert np.asarray(valid)[row, chosen].all()


def test_the_same_key_gives_the_same_anchors_and_another_key_others():
    valid = jnp.asarray(np.random.default_rng(0).random((3, 40)) < 0.5)
    first, again, other = (sampled(jax.random.key(k), valid, 8)[0] for k in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any(axis=1).all()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=arrays.arrays(bool, (2, 12)), seed=st.integers(0, 2**31 - 1))
def test_anchors_of_any_mask_stand_where_a_block_may_begin(wanted, seed):
    places, alive = (
        np.asarray(x) for x in sampled(jax.random.key(seed), blocks.startable(wanted), 5)
    )
    for row in range(2):
        startable = [i for i in range(1, 11) if wanted[row, i] and wanted[row, i + 1]]
        chosen = places[row, alive[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(startable)
        assert len(chosen) == min(5, len(startable))
        assert not places[row, ~alive[row]].any()


def test_missing_anchors_are_dead():
    valid = jnp.zeros((1, 10), bool).at[0, 4].set(True)
    places, alive = blocks.sample(jax.random.key(0), valid, 3)
    assert alive[0].tolist() == [True, False, False]
    assert places[0].tolist() == [4, 0, 0]


def test_every_valid_place_is_drawn_equally_often():
    valid = jnp.ones((400, 10), bool).at[:, :2].set(False)
    places, _ = blocks.sample(jax.random.key(1), valid, 2)
    counts = np.bincount(np.asarray(places).ravel(), minlength=10)
    assert counts[:2].sum() == 0
    assert abs(counts[2:] - 100).max() < 40


def test_an_anchor_needs_a_wanted_token_after_it():
    wanted = jnp.asarray([[True, True, False, True, True, True]])
    assert blocks.startable(wanted)[0].tolist() == [False, False, False, True, True, False]


def test_slots_count_until_the_row_leaves_the_greedy_path():
    tokens = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, 7]])
    best = jnp.asarray([[1, 2, 3, 9, 5, 6, 7, 8]])  # after 3 the target's choice is 9, not 4
    wanted = jnp.ones((1, 8), bool)
    alive = jnp.asarray([[True, True, False]])
    labels, counts = blocks.trained(tokens, wanted, best, jnp.asarray([[1, 5, 0]]), alive, 4)
    assert labels[0, 0].tolist() == [2, 3, 9]
    assert counts[0, 0].tolist() == [True, True, True]
    labels, counts = blocks.trained(tokens, wanted, best, jnp.asarray([[2, 5, 0]]), alive, 4)
    assert labels[0, 0].tolist() == [3, 9, 5]
    assert counts[0].tolist() == [
        [True, True, False],  # slot 3 would follow a token the target did not choose
        [True, True, False],  # the row ends
        [False, False, False],
    ]


def test_slots_outside_the_answer_do_not_count():
    tokens = jnp.arange(8)[None]
    wanted = jnp.ones((1, 8), bool).at[0, 4].set(False)
    _, counts = blocks.trained(
        tokens, wanted, tokens + 1, jnp.asarray([[2]]), jnp.ones((1, 1), bool), 4
    )
    assert counts[0, 0].tolist() == [True, False, False]
