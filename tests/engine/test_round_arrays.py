"""Rounds of requests as arrays, and acceptance rules of a pair's own."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import PlanError
from dflash_jax.graph import Graph, Verification
from dflash_jax.graph.ngram import NGram
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

SOAK = pytest.mark.soak
PROMPT, TOP = [5, 4, 3, 5, 4, 3, 2, 1, 5, 4], 6
TARGET = tiny_target(num_layers=1)
DRAFTERS: dict[str, Any] = {
    name: tiny_drafter(
        TARGET, kind=name, num_layers=1, target_layer_ids=(0,), windows=(None,), causal=(False,)
    )
    for name in ("dflash", "dflash2", "dspark", "domino")
}
PLAN = dj.Plan(max_length=96, chunk=16, block=4, steps_per_call=2)
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@functools.cache
def made(plan: dj.Plan, drafter: str = "dflash", **pair: Any) -> Engine:
    """Return the engine of a random target, with options of its pair."""
    engine = random_engine(TARGET, DRAFTERS.get(drafter), plan, seed=3)
    if drafter == "ngram":
        pair["drafter"] = NGram()
    if pair:
        changed = dataclasses.replace(engine.graph.pair, **pair)
        params = engine.params | ({"drafter": {}} if drafter == "ngram" else {})
        engine = Engine(Graph(changed, plan), params)
    engine.measures_drafting = False
    return engine


def distributions(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Return the target's probabilities after each token, by one program for all lengths."""
    model = dj.TargetModel(TARGET, engine.params["target"], "float32")
    padded = tokens + [0] * (PLAN.max_length - len(tokens))
    return np.asarray(jax.nn.softmax(model.forward([padded]).logits[0]))[: len(tokens)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "drafter",
    ["dflash", "dspark", "ngram", *(pytest.param(x, marks=SOAK) for x in ("dflash2", "domino"))],
)
def test_rounds_have_the_most_probable_tokens_of_drafter_and_target(drafter: str) -> None:
    plan = dataclasses.replace(PLAN, report_top=TOP)
    plain = made(PLAN, drafter).generate(PROMPT, speculative=False, **OPTIONS)
    engine = made(plan, drafter)
    result = engine.generate(PROMPT, trace=True, **OPTIONS)
    assert result.token_ids == plain.token_ids
    first, *rounds = result.trace
    assert (first.drafts, first.draft_top, first.target_top.ids.shape) == ((), None, (1, TOP))
    text = list(PROMPT)
    for each in result.trace:
        drafts, top = each.drafts, each.target_top
        assert len(drafts) == each.proposed
        assert top.ids.shape == top.probs.shape == (each.proposed + 1, TOP)
        probs = distributions(engine, [*text, *drafts])[len(text) - 1 :]
        np.testing.assert_allclose(
            np.take_along_axis(probs, top.ids, axis=1), top.probs, rtol=1e-4, atol=1e-6
        )
        assert (np.diff(top.probs) <= 0).all()
        assert top.probs[:, 0] == pytest.approx(probs.max(axis=1), rel=1e-4)
        agreed = [int(a == b) for a, b in zip(drafts, top.ids[:, 0], strict=False)]
        assert each.accepted == sum(np.cumprod(agreed)) or each is result.trace[-1]
        if drafts:
            assert each.draft_top.ids.shape == (each.proposed, TOP)
            assert each.draft_top.ids[:, 0].tolist() == list(drafts)
            assert (each.draft_top.probs.sum(axis=1) <= 1 + 1e-5).all()
            certain = drafter == "ngram"
            assert (each.draft_top.probs[:, 0] == 1).all() == certain
        text += each.tokens
    assert any(each.drafts for each in rounds)
    found = json.loads(json.dumps(result.to_json()))["trace"]
    assert found[1]["target_top"]["ids"] == rounds[0].target_top.ids.tolist()
    assert found[0]["drafts"] == []
    assert "draft_top" not in found[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 7},
        {"speculative": False},
        pytest.param({"frequency_penalty": 0.5}, marks=SOAK),
    ],
)
def test_the_report_changes_no_token(options: dict[str, Any]) -> None:
    reporting = made(dataclasses.replace(PLAN, report_top=3))
    result = reporting.generate(PROMPT, trace=True, **OPTIONS, **options)
    assert result.token_ids == made(PLAN).generate(PROMPT, **OPTIONS, **options).token_ids
    assert all(each.target_top.ids.shape == (each.proposed + 1, 3) for each in result.trace)
    again = reporting.generate(PROMPT, trace=True, **OPTIONS, **options)
    untimed = [dataclasses.replace(each, seconds=0.0) for each in result.trace]
    assert [dataclasses.replace(each, seconds=0.0) for each in again.trace] == untimed


def test_all_of_the_vocabulary_may_be_reported() -> None:
    """Copies from the text are certain, other drafts are not."""
    plan = dataclasses.replace(PLAN, report_top=10**6, ngram=3)
    engine = made(plan)
    copied = set()
    for each in engine.generate(PROMPT, trace=True, **OPTIONS).trace[1:]:
        assert each.target_top.ids.shape[1] == TARGET.vocab_size
        assert each.target_top.probs.sum(axis=1) == pytest.approx(1, rel=1e-4)
        if each.drafts:
            assert each.draft_top.probs.sum(axis=1) == pytest.approx(1, rel=1e-4)
            assert (each.draft_top.probs[:, 0] == 1).all() == each.copied
            copied.add(each.copied)
    assert copied


@pytest.mark.exhaustive
def test_plans_that_do_not_ask_keep_no_logits() -> None:
    graph = made(PLAN).graph
    asked = graph.with_plan(report_top=TOP)
    for name in ("prefill", "plain", "speculative"):
        assert "top_k" not in graph.lower(name).as_text()
        assert "top_k" in asked.lower(name).as_text()


# -- acceptance of a pair's own --------------------------------------------------------------------


def equality(given: Verification) -> tuple[jax.Array, jax.Array]:
    """The rule of exact plans."""
    right = given.drafts == given.chosen[:, :-1]
    right &= jnp.arange(right.shape[1]) < given.num_drafts[:, None]
    accepted = jnp.cumprod(right, axis=1).sum(axis=1)
    return accepted, jnp.take_along_axis(given.chosen, accepted[:, None], axis=1)[:, 0]


def among_best(given: Verification) -> tuple[jax.Array, jax.Array]:
    """Accept drafts among the target's best tokens."""
    _, best = jax.lax.top_k(given.logits[:, :-1], BEST)
    near = (best == given.drafts[:, :, None]).any(axis=2)
    near &= jnp.arange(near.shape[1]) < given.num_drafts[:, None]
    accepted = jnp.cumprod(near, axis=1).sum(axis=1)
    return accepted, jnp.take_along_axis(given.chosen, accepted[:, None], axis=1)[:, 0]


def rejection(given: Verification) -> tuple[jax.Array, jax.Array]:
    """Rejection sampling (arXiv 2211.17192), whose tokens have the target's distribution."""
    p, q = jax.nn.softmax(given.logits), jax.nn.softmax(given.draft_logits)
    of = given.drafts[:, :, None]
    ratio = jnp.take_along_axis(p[:, :-1], of, 2) / jnp.take_along_axis(q, of, 2)
    draws = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key)))(given.keys[:, :-1])
    kept = (draws < ratio[:, :, 0]) & (jnp.arange(q.shape[1]) < given.num_drafts[:, None])
    accepted = jnp.cumprod(kept, axis=1).sum(axis=1)
    rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    whole = accepted == given.num_drafts  # nothing was rejected
    at = accepted[:, None, None]
    left = jnp.where(
        whole[:, None], jnp.take_along_axis(p, at, 1)[:, 0], jnp.take_along_axis(rest, at, 1)[:, 0]
    )
    last = jnp.take_along_axis(given.keys, accepted[:, None], axis=1)[:, 0]
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(last)
    return accepted, jax.vmap(jax.random.categorical)(keys, jnp.log(left))


BEST = 40  # of 97 tokens: random drafters agree with random targets by chance
INEXACT = dataclasses.replace(PLAN, exact=False)


@pytest.mark.exhaustive
def test_the_rule_of_equality_gives_plain_output() -> None:
    plain = made(INEXACT).generate(PROMPT, speculative=False, **OPTIONS)
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"frequency_penalty": 0.3}):
        wanted = made(INEXACT).generate(PROMPT, **OPTIONS, **options)
        found = made(INEXACT, acceptance=equality).generate(PROMPT, **OPTIONS, **options)
        assert found.token_ids == wanted.token_ids
        assert found.stats.acceptance_lengths == wanted.stats.acceptance_lengths
    assert made(INEXACT).generate(PROMPT, **OPTIONS).token_ids == plain.token_ids


def test_a_lenient_rule_accepts_what_it_says() -> None:
    plan = dataclasses.replace(INEXACT, report_top=BEST)
    engine = made(plan, acceptance=among_best)
    result = engine.generate(PROMPT, trace=True, **OPTIONS)
    for each in result.trace[1:-1]:
        near = [d in top for d, top in zip(each.drafts, each.target_top.ids, strict=False)]
        assert each.accepted == int(np.cumprod(near).sum())
        assert each.tokens[-1] == each.target_top.ids[each.accepted, 0]
    strict = made(INEXACT).generate(PROMPT, **OPTIONS)
    assert result.stats.accepted > strict.stats.accepted
    plain = engine.generate(PROMPT, speculative=False, **OPTIONS)
    assert plain.token_ids == strict.token_ids


@pytest.mark.exhaustive
def test_rejection_sampling_has_the_distribution_of_the_target() -> None:
    """Of the second token, which the first round decides, over many seeds."""
    plan = dataclasses.replace(INEXACT, rows=8, block=3, steps_per_call=1)
    engine, count = made(plan, acceptance=rejection), 1500
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
    answers = engine.generate_many([PROMPT], n=count, seed=1, **options)
    first = distributions(engine, PROMPT)[-1]
    model = dj.TargetModel(TARGET, engine.params["target"], "float32")
    texts = [[*PROMPT, token] for token in range(TARGET.vocab_size)]
    wanted = count * first @ np.asarray(jax.nn.softmax(model.forward(texts).logits[:, -1]))

    def distance(tokens: list[int]) -> float:
        """Chi squared, whose mean is about the size of the vocabulary."""
        counts = np.bincount(tokens, minlength=TARGET.vocab_size)
        return float(((counts - wanted) ** 2 / wanted).sum())

    spread = 6 * (2 * TARGET.vocab_size) ** 0.5
    assert distance([x.token_ids[1] for x in answers]) < TARGET.vocab_size + spread
    drafts = [x for answer in answers for x in answer.stats.acceptance_lengths[:1]]
    assert {1, 2, 3} == set(drafts)

    def all_of_them(given: Verification) -> tuple[jax.Array, jax.Array]:
        return given.num_drafts, given.chosen[:, -1]

    other = made(plan, acceptance=all_of_them).generate_many([PROMPT], n=count, seed=1, **options)
    assert distance([x.token_ids[1] for x in other]) > TARGET.vocab_size + spread


def test_rules_of_its_own_are_refused_in_exact_plans() -> None:
    with pytest.raises(PlanError, match=r"acceptance of its own, among_best, .* exact=False"):
        made(PLAN, acceptance=among_best)
    engine = made(INEXACT, acceptance=among_best)
    with pytest.raises(PlanError, match="among_best"):
        engine.graph.with_plan(exact=True)


def test_what_a_rule_returns_is_checked() -> None:
    def wrong(given: Verification) -> Any:
        return given.num_drafts, given.chosen

    with pytest.raises(PlanError, match=r"returned shapes \(1,\) and \(1, 4\); expected \(1,\)"):
        made(INEXACT, acceptance=wrong).generate(PROMPT, **OPTIONS)

    def wild(given: Verification) -> Any:
        return given.num_drafts + 9, given.num_drafts - 7

    found = made(INEXACT, acceptance=wild).generate(PROMPT, **OPTIONS)
    assert all(0 <= token < TARGET.vocab_size for token in found.token_ids)
    assert set(found.stats.acceptance_lengths[:-1]) == {4}


@pytest.mark.exhaustive
def test_a_rule_decides_no_token_that_a_grammar_excludes() -> None:
    def everything(given: Verification) -> tuple[jax.Array, jax.Array]:
        return given.num_drafts, given.drafts[:, 0]

    plan = dj.Plan(exact=False, max_length=96, chunk=16)
    tiny = dj.load("tiny", plan=plan)
    pair = dataclasses.replace(tiny.graph.pair, acceptance=everything)
    engine = Engine(Graph(pair, tiny.plan), tiny.params, tokenizer=tiny.tokenizer)
    engine.measures_drafting = False
    for shape in ("[a-f]{20}", "(no|yes), [0-9]{9}"):
        found = engine.generate("Say something.", max_tokens=40, structured={"regex": shape})
        assert re.fullmatch(shape, str(found.text))
