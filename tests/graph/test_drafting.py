"""Drafts of rows that sample, and the distribution of their output."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import PROMPT, ROWS, SAID, VOCAB, all_logits, chisquare, law, likelihood, said

from dflash_jax import Plan
from dflash_jax.engine import request as requests
from dflash_jax.engine.state_machine import speculation
from dflash_jax.graph.state import RowRules, idle_rules
from dflash_jax.graph.steps import sampling
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

WALKERS = {
    "dflash2": {"selector_top_k": 3},
    "dspark": {"markov_head": "rnn", "draft_vocab_size": 4, "own_head": True},
}
FILTERS = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}


def rules(rows: int, **columns: Any) -> RowRules:
    free = idle_rules(Plan(rows=rows, max_length=8, block=2, chunk=2))
    arrays = {
        name: jnp.broadcast_to(jnp.asarray(value, getattr(free, name).dtype), (rows,))
        for name, value in columns.items()
    }
    if "seed" in arrays:
        arrays["seed"] = jnp.stack([jnp.zeros_like(arrays["seed"]), arrays["seed"]], axis=1)
    return RowRules(**vars(free) | arrays)


def sampler(rules: RowRules, places: int, *, sampled: bool) -> RowDraftSampler:
    zeros = jnp.zeros((len(rules.limit),), jnp.int32)
    return RowDraftSampler(rules, zeros, zeros, places, sampled, VOCAB, "xla")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_sampled_output_has_the_distribution_of_the_target(kind: str) -> None:
    """The whole step: candidates, a reduced vocabulary, blocks cut by confidence."""
    target = tiny_target(num_layers=2, vocab_size=VOCAB)
    own = {"num_layers": 1, "windows": (None,), "causal": (False,)} | WALKERS[kind]
    drafter = tiny_drafter(target, kind, **own)
    cut = 0.2 if kind == "dspark" else 0.0
    plan = Plan(rows=ROWS, max_length=16, block=4, chunk=8, confidence_threshold=cut)
    engine = random_engine(target, drafter, plan, seed=4)
    if kind == "dspark":  # tokens 0, 1, 3 and 5
        engine.params["drafter"]["d2t"] = jnp.asarray([0, 0, 1, 2], jnp.int32)
        engine.params["drafter"]["confidence_bias"] *= 0
    tokens, stats = said(engine, range(8 * ROWS), **FILTERS)
    p = law(all_logits(engine), **FILTERS)
    assert likelihood(tokens, p / p.sum()) > 1e-3
    sharper = p**1.5
    assert likelihood(tokens, sharper / sharper.sum()) < 1e-6, "the test could not tell"
    accepted, drafted = sum(s.accepted for s in stats), sum(s.drafted for s in stats)
    assert 0.05 < accepted / drafted < 0.95  # both branches were taken
    greedy = engine.submit(PROMPT, max_tokens=SAID)  # a greedy request among sampled ones
    again, _ = said(engine, range(40), **FILTERS)
    assert again.tolist() == tokens[:40].tolist()
    plain = engine.generate(PROMPT, max_tokens=SAID, speculative=False)
    assert greedy.result().token_ids == plain.token_ids


@pytest.mark.exhaustive
def test_sampled_output_keeps_its_distribution_where_drafting_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a step drafts depends on which drafts were accepted before."""
    target = tiny_target(num_layers=2, vocab_size=VOCAB)
    drafter = tiny_drafter(target, num_layers=1, windows=(None,), causal=(False,))
    engine = random_engine(
        target, drafter, Plan(rows=ROWS, max_length=16, block=3, chunk=8), seed=4
    )
    # One round drafts; requests in which any of its drafts was accepted go on, the others stop.
    engine.core.meter.use(speculation.BreakEven.constant(1.2))
    monkeypatch.setattr(speculation, "PROBE", 1)
    monkeypatch.setattr(speculation, "PRIOR", 0)
    engine.core.acceptance = known = speculation.AcceptanceHistory(length=9.0, requests=1)
    monkeypatch.setattr(speculation.AcceptanceHistory, "after_request", lambda *_: known)
    seeds = itertools.count()
    monkeypatch.setattr(requests.secrets, "randbits", lambda _: next(seeds))
    tokens, stats = said(engine, [None] * (8 * ROWS), **FILTERS)
    p = law(all_logits(engine), **FILTERS)
    assert likelihood(tokens, p / p.sum()) > 1e-3
    sharper = p**1.5
    assert likelihood(tokens, sharper / sharper.sum()) < 1e-6, "the test could not tell"
    stopped = [s.fallbacks["below_break_even"] > 0 for s in stats]
    assert 0.05 < np.mean(stopped) < 0.95
    assert sum(s.plain_steps for s in stats) > len(stats) / 4


@pytest.mark.exhaustive
def test_places_of_a_walk_are_drawn_as_the_target_draws_them() -> None:
    rows, size, places = 4000, VOCAB, 2
    scores = jnp.broadcast_to(jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5, -3.0]), (rows, size))
    temperature = np.where(np.arange(rows) < rows - 1, 1.3, 0.0)
    columns = rules(rows, temperature=temperature, seed=np.arange(rows))
    choose = sampler(columns, places, sampled=True)
    first, second = (choose.sample_one(scores, place) for place in range(places))
    q = np.asarray(jax.nn.softmax(scores[0] / 1.3), np.float64)
    joint = np.bincount(first.index[:-1] * size + second.index[:-1], minlength=size * size)
    expected = np.outer(q, q).ravel() * (rows - 1)
    expected *= joint.sum() / expected.sum()
    assert chisquare(joint, expected) > 1e-3  # and places are independent
    assert first.index[-1] == 3
    both = jnp.stack([scores, scores], axis=1)
    start = jnp.ones(rows, jnp.int32)
    chosen = sampling.choose_tokens(both, start, columns, sampled=True, kernels="xla")
    assert jnp.array_equal(jnp.stack([first.index, second.index], axis=1), chosen)
    assert jnp.array_equal(choose.sample_all(both).index, chosen)


def test_drafts_from_some_tokens_are_drawn_as_from_all() -> None:
    columns, ids = rules(50, temperature=1.0, seed=np.arange(50)), jnp.asarray([4, 0, 5])
    choose = sampler(columns, 3, sampled=True)
    logits = jnp.full((50, 3, VOCAB), -1e9).at[:, :, ids].set(0.0)
    wanted = choose.sample_all(logits).index
    assert jnp.array_equal(ids[choose.sample_all(logits[:, :, ids], ids).index], wanted)
    by_row = jnp.broadcast_to(ids, (50, 3))
    one = choose.sample_one(logits[:, 1, ids], 1, by_row)
    assert jnp.array_equal(ids[one.index], wanted[:, 1])


def test_scores_that_are_not_finite_are_told_and_never_compared() -> None:
    scores = jnp.asarray([[0.0, jnp.nan], [0.0, 1.0], [jnp.inf, 1.0]])
    ids = jnp.arange(2)
    for sampled in (False, True):
        choose = sampler(rules(3, temperature=1.0), 1, sampled=sampled)
        for choice in (
            choose.sample_one(scores, 0, ids),
            choose.sample_all(scores[:, None], ids),
        ):
            assert choice.finite.tolist() == [False, True, False]
            assert jnp.isin(choice.index, ids).all()


def test_unlikely_drafts_are_not_verified() -> None:
    columns = rules(2, max_drafts=np.array([3, 3]))
    tokens, finite = jnp.asarray([[1, 2, 3], [4, 5, 6]]), jnp.asarray([True, False])
    choose = dataclasses.replace(sampler(columns, 3, sampled=False), confidence_threshold=0.5)
    confidence = jnp.asarray([[0.9, 0.6, 0.4], [0.9, 0.6, 0.5]])
    draft = choose.draft(tokens, finite, confidence=confidence)
    assert draft.block.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert draft.num_drafts is not None
    assert draft.num_drafts.tolist() == [2, 3]
