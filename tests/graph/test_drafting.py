"""Walked drafts: what q is, and that sampled output keeps the target's distribution."""

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
from dflash_jax.graph.steps.acceptance import accept_greedy, accept_sampled
from dflash_jax.graph.steps.drafting import RowDraftSampler, over_vocabulary
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


def sampler(rules: RowRules, *, sampled: bool) -> RowDraftSampler:
    zeros = jnp.zeros((len(rules.limit),), jnp.int32)
    return RowDraftSampler(rules, zeros, zeros, zeros[:, None], sampled, VOCAB)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_sampled_output_has_the_distribution_of_the_target(kind: str) -> None:
    """The whole step: q over candidates, a reduced vocabulary, blocks cut by confidence."""
    target = tiny_target(num_layers=2, vocab_size=VOCAB)
    own = {"num_layers": 1, "windows": (None,), "causal": (False,)} | WALKERS[kind]
    drafter = tiny_drafter(target, kind, **own)
    cut = 0.2 if kind == "dspark" else 0.0
    plan = Plan(rows=ROWS, max_length=16, block=4, chunk=8, min_survival=cut)
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


def test_sampled_output_keeps_its_distribution_where_drafting_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a step drafts depends on which drafts were accepted before."""
    target = tiny_target(num_layers=2, vocab_size=VOCAB)
    drafter = tiny_drafter(target, num_layers=1, windows=(None,), causal=(False,))
    engine = random_engine(
        target, drafter, Plan(rows=ROWS, max_length=16, block=3, chunk=8), seed=4
    )
    # One round drafts; requests in which all its drafts were accepted go on, the others stop.
    engine.core.meter.use(speculation.BreakEven((0,), (2.5,)))
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


def test_a_place_of_a_walk_is_drawn_from_its_q() -> None:
    rows, size = 4000, 5
    scores = jnp.broadcast_to(jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5]), (rows, size))
    temperature = np.where(np.arange(rows) < rows - 1, 1.3, 0.0)
    columns = rules(rows, temperature=temperature, seed=np.arange(rows))
    choose = sampler(columns, sampled=True)
    noise = choose.noise(2, size)
    assert noise is not None
    first, second = choose.sample_one(scores, noise[:, 0]), choose.sample_one(scores, noise[:, 1])
    assert first.q is not None
    q = np.asarray(first.q[0], np.float64)
    np.testing.assert_allclose(q, jax.nn.softmax(scores[0] / 1.3), atol=1e-6)
    joint = np.bincount(first.index[:-1] * size + second.index[:-1], minlength=size * size)
    expected = np.outer(q, q).ravel() * (rows - 1)
    expected *= joint.sum() / expected.sum()
    assert chisquare(joint, expected) > 1e-3  # and places are independent
    assert first.index[-1] == 3
    assert first.q[-1].tolist() == [0, 0, 0, 1, 0]


def test_scores_that_are_not_finite_are_told_and_never_compared() -> None:
    scores = jnp.asarray([[0.0, jnp.nan], [0.0, 1.0], [jnp.inf, 1.0]])
    for sampled in (False, True):
        choose = sampler(rules(3, temperature=1.0), sampled=sampled)
        noise = choose.noise(1, 2)
        for choice in (
            choose.sample_one(scores, None if noise is None else noise[:, 0]),
            choose.sample_all(scores[:, None]),
        ):
            assert choice.finite.tolist() == [False, True, False]
            assert sampled == (choice.q is not None)
            assert choice.q is None or bool(jnp.isfinite(choice.q).all())


def test_q_over_candidates_is_spread_over_the_vocabulary() -> None:
    q = jnp.asarray([[[0.25, 0.75], [0.5, 0.5]]])
    ids = jnp.asarray([[[3, 1], [0, 4]]])
    by_place = over_vocabulary(q, ids, 5)
    assert by_place.tolist() == [[[0, 0.75, 0, 0.25, 0], [0.5, 0, 0, 0, 0.5]]]
    everywhere = over_vocabulary(q, jnp.asarray([4, 2]), 5)
    assert everywhere.tolist() == [[[0, 0, 0.75, 0, 0.25], [0, 0, 0.5, 0, 0.5]]]


def test_none_of_a_draft_that_is_not_finite_is_verified() -> None:
    zeros, options = jnp.zeros((2,), jnp.int32), {"sampled": False, "vocab_size": VOCAB}
    columns = rules(2, max_drafts=np.array([3, 3]))
    tokens, finite = jnp.asarray([[1, 2, 3], [4, 5, 6]]), jnp.asarray([True, False])
    sampler = RowDraftSampler(columns, zeros, zeros, 3, **options, min_survival=0.5)
    survival = jnp.asarray([[0.9, 0.6, 0.4]] * 2)
    draft = sampler.draft(tokens, None, finite, survival=survival)
    assert draft.block.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert draft.num_drafts is not None
    assert draft.num_drafts.tolist() == [2, 0]


def test_drafts_that_do_not_count_are_as_if_never_drawn() -> None:
    block, best = jnp.asarray([[7, 1, 2, 3]] * 4), jnp.asarray([[1, 2, 3, 4]] * 4)
    count = jnp.asarray([0, 1, 2, 3])
    assert accept_greedy(block, best, count).tolist() == [1, 2, 3, 4]
    p = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(5), (4, 4)), jnp.float32)
    q = jnp.broadcast_to(jax.nn.one_hot(block[:, 1:], 5), (4, 3, 5))
    n, rest = accept_sampled(block[:, 1:], q, p, jnp.zeros((4, 3)), count)
    assert n.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(rest, [p[i, i] for i in range(4)], rtol=1e-6)
