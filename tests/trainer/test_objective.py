"""Losses and weights against their closed forms; chunks change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.networks import build_pair
from dflash_jax.nn.objective import distance as distance_of
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.trainer import objective
from dflash_jax.trainer.recipes import DPACE, SMOKE, UNIFORM

COUNTS = jnp.asarray([[[True, True, True], [True, True, False], [False] * 3]])


def test_decay_weights_match_their_closed_form():
    expected = [np.exp(-(k - 1) / 4.0) for k in range(1, 8)]
    np.testing.assert_allclose(objective.decay_weights(7, 4.0), expected, rtol=1e-6)
    assert abs(sum(expected) - 3.74) < 0.01


def test_dpace_weights_match_their_closed_form_and_carry_no_gradient():
    chance = np.asarray([0.8, 0.3, 0.6])
    smooth = 0.5 * chance + 0.5
    reached = np.cumprod(smooth)
    expected = [reached.sum(), reached[1:].sum(), reached[2]]
    recipe = dataclasses.replace(SMOKE, weights=DPACE)

    def weights(nll):
        return objective.place_weights(recipe, nll, COUNTS, COUNTS)

    nll = jnp.broadcast_to(jnp.asarray(-np.log(chance), jnp.float32)[None, None], COUNTS.shape)
    found = weights(nll)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(found[0, 1], [reached[:2].sum(), reached[1], 0], rtol=1e-5)
    assert not found[0, 2].any()
    assert not jax.grad(lambda x: weights(x).sum())(nll).any()


@pytest.mark.parametrize("weights", ["auf", "vat", "uniform"])
def test_places_after_the_first_wrong_draft_weigh_less_or_nothing(weights: str) -> None:
    recipe = dataclasses.replace(SMOKE, weights=weights, decay=2.5)
    right = jnp.asarray([[[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]]], bool)
    counts = jnp.ones(right.shape, bool).at[0, 3, 3].set(False)
    past = np.asarray([[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 1]])
    shapes = {"auf": past == 0, "vat": np.exp(-past / 2.5), "uniform": past >= 0}
    found = objective.place_weights(recipe, jnp.zeros(right.shape), right, counts)
    np.testing.assert_allclose(found, shapes[weights] * np.asarray(counts), rtol=1e-6)


def test_the_confidence_head_does_not_change_what_drafts_are_made_of() -> None:
    target = tiny_target(num_layers=1)
    config = tiny_drafter(target, "dspark", target_layer_ids=(0,))
    pair = build_pair(target, config)
    assert pair.drafter is not None
    params = jax.device_put(random_params(pair)["drafter"])
    hidden = jax.random.normal(jax.random.key(0), (1, 4, config.hidden_size))
    labels = jnp.asarray([[1, 2, 3, 4]])
    head = jax.random.normal(jax.random.key(1), (config.hidden_size, 97))
    score = objective.scorer(pair.drafter, lambda x: x @ head, lambda x: x @ head, "ce")

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def slope(params, hidden):
        places = objective.Places(hidden, labels, labels, jnp.ones((1, 4, 32)))
        return score(params, places).head.sum()

    of_params, of_hidden = slope(params, hidden)
    assert np.asarray(of_params["confidence"]).any()
    assert not np.asarray(of_params["markov_w1"]).any()
    assert not np.asarray(of_hidden).any()


def scores(seed: int) -> objective.Scores:
    values = jax.random.uniform(jax.random.key(seed), (3, *COUNTS.shape))
    right = values[2] > 0.4
    return objective.Scores(values[0], values[0], right, values[1], right)


def total(recipe, found, counts) -> tuple:
    return objective.total(recipe, objective.sums(recipe, found, counts))


def test_the_loss_is_one_weighted_mean_blind_to_places_that_do_not_count():
    found, _ = total(SMOKE, scores(0), COUNTS)
    weights = np.exp(-np.arange(3) / SMOKE.decay)[None, None] * np.asarray(COUNTS)
    values = np.asarray(scores(0).loss)
    np.testing.assert_allclose(found, (values * weights).sum() / weights.sum(), rtol=1e-6)
    spoilt = scores(0).replace(loss=jnp.where(COUNTS, scores(0).loss, 99.0))
    np.testing.assert_array_equal(total(SMOKE, spoilt, COUNTS)[0], found)


def test_a_batch_without_any_place_costs_nothing():
    loss, logged = total(SMOKE, scores(0), jnp.zeros_like(COUNTS))
    assert (float(loss), float(logged["simulated"])) == (0.0, 1.0)


def test_simulated_acceptance_counts_leading_runs_of_whole_blocks():
    right = jnp.asarray([[[True, True, False], [True, True, True], [True] * 3]])
    found = scores(0).replace(right=right)
    assert float(total(SMOKE, found, COUNTS)[1]["simulated"]) == 3.0  # only block 0


def test_head_losses_count_where_the_head_could_know():
    recipe = dataclasses.replace(SMOKE, kind="dflash2", weights=UNIFORM, head_weight=2.0)
    given = scores(1)
    on = np.asarray(given.head_counts & COUNTS)
    expected = np.asarray(given.loss)[np.asarray(COUNTS)].mean() + 2 * given.head[on].mean()
    np.testing.assert_allclose(total(recipe, given, COUNTS)[0], expected, rtol=1e-6)


def places(width: int) -> tuple[objective.Places, dict]:
    keys = jax.random.split(jax.random.key(2), 4)
    shape = (2, 6, 3)
    made = objective.Places(
        hidden=jax.random.normal(keys[0], (*shape, width)),
        labels=jax.random.randint(keys[1], shape, 0, 11),
        previous=jax.random.randint(keys[2], shape, 0, 11),
        teacher=None,
    )
    return made, {"head": jax.random.normal(keys[3], (width, 11))}


def plain_score(params: dict, given: objective.Places) -> objective.Scores:
    logits = given.hidden @ params["head"]
    log = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log, given.labels[..., None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == given.labels
    return objective.Scores(nll, nll, right, nll * 0, right)


def test_scores_in_chunks_equal_whole_ones_in_values_and_gradients(monkeypatch):
    given, params = places(4)

    def at(limit):
        monkeypatch.setattr(objective, "LOGIT_ELEMENTS", limit)

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            found = objective.in_chunks(plain_score, params, given, 11)
            return (found.loss * jnp.arange(36.0).reshape(2, 6, 3)).sum()

        return loss(params)

    whole, cut = at(10_000), at(150)
    np.testing.assert_allclose(whole[0], cut[0], rtol=1e-6)
    np.testing.assert_allclose(whole[1]["head"], cut[1]["head"], rtol=1e-5)


def test_the_fewest_parts_that_divide_are_taken():
    assert [objective.fewest_parts(12, 100, limit) for limit in (100, 99, 30, 20, 1)] == [
        1,
        2,
        4,
        6,
        12,
    ]


@pytest.mark.parametrize("loss", ["kl", "mix"])
def test_distances_vanish_where_the_distributions_agree(loss):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    p = jax.nn.softmax(logits, axis=-1)
    distance = functools.partial(distance_of, loss, nll=jnp.zeros((2, 3)), p=p)
    np.testing.assert_allclose(distance(logits), jnp.zeros((2, 3)), atol=1e-6)
    other = jnp.roll(logits, 1, axis=-1)
    q = np.asarray(jax.nn.softmax(other, axis=-1))
    expected = {
        "kl": (p * np.log(np.asarray(p) / q)).sum(axis=-1),
        "mix": 0.9 * 0.5 * np.abs(p - q).sum(axis=-1),
    }
    np.testing.assert_allclose(distance(other), expected[loss], rtol=1e-4)
