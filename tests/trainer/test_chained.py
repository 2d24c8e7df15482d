"""Chained anchors: where decoding drafts, by its recorded rounds."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.trainer import (
    blocks,
    drafter,
    features,
    initial_weights,
    mask_token,
    objective,
    setup,
)
from dflash_jax.trainer.recipes import RECIPES, SMOKE, new_drafter

PROMPTS = Path(dj.__file__).with_name("data") / "tiny/heldout.jsonl"
LENGTH, ANSWER = 128, 48


def texts(tokenizer, count):
    """Return token ids of the beginnings of held-out code."""
    lines = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    code = (tokenizer.encode(entry["text"])[:60] for entry in lines if entry["kind"] == "code")
    return list(itertools.islice(code, count))


@pytest.mark.parametrize("kind", ["dflash", pytest.param("dspark", marks=pytest.mark.soak)])
def test_a_chained_anchor_is_where_decoding_drafts_after_the_round_before(kind):
    recipe = dataclasses.replace(
        RECIPES["tiny-pair"],
        kind=kind,
        rank=8,
        confidence_head=False,
        sample_from_anchor=False,
        chained=0.5,
    )
    model = setup.open_target("tiny", recipe)
    config = new_drafter(
        recipe, model.config, mask_token.mask_token(model.tokenizer, model.config)[0]
    )
    pair = build_pair(model.config, config)
    params, _ = initial_weights.replaced(
        initial_weights.fresh(pair, 0), setup.read_start(Path("tiny"), config)
    )
    if kind == "dspark":  # a correction that changes some drafts
        params["markov_w2"] = jax.random.normal(jax.random.key(0), params["markov_w2"].shape)
    both = {"target": model.params, "drafter": params}
    plan = dj.Plan(max_length=LENGTH, chunk=64, block=config.step_width)
    engine = Engine(build_graph(model.config, config, plan), both, tokenizer=model.tokenizer)
    engine.measures_drafting = False

    @jax.jit
    def chained(params, part):
        read = features.target_features(
            pair, params["target"], part.tokens, dtype="float32", keep=False
        )
        every = np.arange(part.anchors.shape[1])
        return drafter.chained(pair, params, recipe, read, part, every)

    lengths = []
    for prompt in texts(model.tokenizer, 2):
        result = engine.generate(prompt, max_tokens=ANSWER, ignore_eos=True)
        rounds = result.stats.acceptance_lengths
        starts = len(prompt) + np.cumsum([0, *rounds])
        anchors = np.zeros((1, ANSWER), np.int32)
        anchors[0, : len(rounds)] = starts[:-1]
        tokens = np.zeros((1, LENGTH), np.int32)
        ids = [*prompt, *result.token_ids]
        tokens[0, : len(ids)] = ids
        places = np.arange(LENGTH)[None]
        wanted = (places >= len(prompt)) & (places < len(ids))
        found = chained(both, drafter.BatchPart(tokens, wanted, anchors, anchors > 0, None))
        # The last round ends with the answer: no block can start after it.
        whole = len(rounds) - 1
        np.testing.assert_array_equal(found.anchors[0, :whole], starts[1 : whole + 1])
        assert found.alive[0, :whole].all()
        assert not found.alive[0, whole:].any()
        lengths += rounds
    assert len(set(lengths)) > 3


@pytest.mark.parametrize(
    ("count", "share", "moved"), [(64, 0.7, 40), (16, 0.7, 8), (10, 0.7, 7), (4, 1, 3), (1, 1, 0)]
)
def test_chained_anchors_are_evenly_spread_and_never_all(count, share, moved):
    found = blocks.chained_share(count, share)
    assert len(found) == moved
    assert len(set(found.tolist())) == moved
    if moved:
        assert found[0] == 0
        assert np.diff(found).max() <= -(-count // moved)
        assert found[-1] < count
    assert not len(blocks.chained_share(count, 0.0))


def test_a_round_ends_with_the_token_after_its_accepted_drafts():
    wanted = jnp.ones((1, 12), bool).at[0, :2].set(False).at[0, 9].set(False)
    accepted = jnp.asarray(
        [[[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]]], bool
    )
    anchors = jnp.asarray([[2, 2, 3, 4, 7, 9]])
    alive = jnp.ones((1, 6), bool)
    found, alive = blocks.after_round(anchors, alive.at[0, 1].set(False), accepted, wanted)
    assert alive[0].tolist() == [True, False, True, False, False, False]
    assert found[0].tolist() == [5, 0, 7, 0, 0, 0]  # no block starts at 8, 9 or past the row


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_gradient_is_that_of_blocks_at_the_chained_anchors(parts):
    target = tiny_target(num_layers=1)
    shape = {"num_layers": 1, "windows": (None,), "causal": (False,), "target_layer_ids": (0,)}
    pair = build_pair(target, tiny_drafter(target, "dflash", block_size=4, **shape))
    params = jax.device_put(random_params(pair, seed=3))
    ids = jax.random.randint(jax.random.key(6), (4, 24), 0, 96)
    wanted = jnp.ones(ids.shape, bool).at[:, :3].set(False)
    recipe = dataclasses.replace(SMOKE, chained=0.7, parts=parts)
    run = jax.jit(functools.partial(drafter.gradient, pair, recipe), static_argnums=(5,))
    slope, logged = run(params["drafter"], params["target"], (ids, wanted), None, 7, 5)

    @jax.jit
    def by_hand(params):
        key = jax.random.fold_in(jax.random.key(recipe.seed), 7)
        anchors, alive = blocks.sample(key, blocks.startable(wanted), 5)
        part = drafter.BatchPart(ids, wanted, anchors, alive, None)
        read = features.target_features(pair, params["target"], ids, dtype="float32", keep=False)
        moved = blocks.chained_share(5, 0.7)
        part = drafter.chained(pair, params, recipe, read, part, moved)
        plain = dataclasses.replace(recipe, chained=0.0)

        def loss(own):
            return objective.total(plain, drafter.sums(pair, plain, own, params["target"], part))

        return *jax.grad(loss, has_aux=True)(params["drafter"]), anchors, part.anchors

    wanted_slope, plain, before, after = by_hand(params)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)
    jax.tree.map(close, slope, wanted_slope)
    close(logged["loss"], plain["loss"])
    assert {"simulated", "simulated_chained"} <= logged.keys()
    assert "simulated_chained" not in plain
    assert (after[:, [2, 4]] == before[:, [2, 4]]).all()
    assert (after[:, [0, 1, 3]] != before[:, [0, 1, 3]]).all()
