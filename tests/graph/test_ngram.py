"""Drafts copied from the text: lossless for every family, accepted where text repeats."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.copying import Copying
from dflash_jax.graph.memory import budget
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.state import COPIED, RowRules, pack_output, read_output
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.networks import build_pair
from dflash_jax.testing import (
    random_engine,
    random_params,
    tiny_drafter,
    tiny_gemma,
    tiny_hybrid,
    tiny_target,
)

REPEATED = [7, 8, 9, 10, 11, 12] * 3 + [7, 8, 9]


def drafts(text: list[int], places: int, **options: int) -> list[int]:
    """Return the drafts after a text, in a row whose slots hold other tokens after it."""
    ngram, slots = NGram(**options), 64
    state = (
        jnp.full((1, slots), 99, jnp.int32)
        .at[0, : len(text) - 1]
        .set(jnp.array(text[:-1], jnp.int32))
    )
    anchor, start = jnp.array([text[-1]]), jnp.array([len(text) - 1])
    one = jnp.zeros(1, jnp.int32)
    rules = RowRules(*[one] * 2, one + places, *[one] * 5)
    sampler = RowDraftSampler(rules, anchor, start, places, False, 100, "xla")
    draft, _ = ngram.propose({}, state, anchor, start, None, sampler)  # pyrefly: ignore
    count = min(int(draft.num_drafts[0]), places)
    return np.asarray(draft.block)[0, 1 : 1 + count].tolist()


def test_the_continuation_of_the_longest_and_latest_match_is_drafted() -> None:
    assert drafts(REPEATED, 4) == [10, 11, 12, 7]
    assert drafts([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 3) == [5, 6, 1]  # latest of equally long ones
    assert drafts([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], 2) == [3, 5]  # longer beats later
    assert drafts([1, 2, 3, 1], 4) == []  # one token is no match
    assert drafts([1, 2, 3, 1], 4, least=1) == [2, 3, 1, 2]  # and again after the anchor
    assert drafts([3, 3, 3, 3], 4) == [3, 3, 3, 3]
    assert drafts([5], 4) == []


GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "top_k": 4}


@pytest.mark.sample("hybrid")
@pytest.mark.parametrize(
    ("target", "dtype", "ways"),
    [
        pytest.param(tiny_target(), "bfloat16", (GREEDY, SAMPLED), id="llama"),
        pytest.param(tiny_gemma(), "float32", (GREEDY,), id="gemma4", marks=pytest.mark.soak),
        pytest.param(tiny_hybrid(), "float32", (GREEDY,), id="hybrid"),
        pytest.param(
            tiny_gemma(), "float32", (SAMPLED,), id="gemma4-sampled", marks=pytest.mark.soak
        ),
        pytest.param(
            tiny_hybrid(), "float32", (SAMPLED,), id="hybrid-sampled", marks=pytest.mark.soak
        ),
    ],
)
def test_output_is_that_of_plain_decoding(
    target: TargetConfig, dtype: str, ways: tuple[dict[str, Any], ...]
) -> None:
    pair = dataclasses.replace(build_pair(target), drafter=NGram(block=4, least=1))
    plan = dj.Plan(rows=2, block=4, max_length=128, dtype=dtype, prefix_cache=1 << 20, chunk=8)
    graph = dj.Graph(pair, plan)
    params = jax.device_put({"target": random_params(build_pair(target), dtype=dtype)["target"]})
    engine = Engine(graph, params)
    drafted, accepted = [], 0
    for options in ways:
        for prompt in (REPEATED, REPEATED[:17], [1, 2, 3]):
            more = {"max_tokens": 40, "ignore_eos": True} | options
            result = engine.generate(prompt, **more)
            plain = engine.generate(prompt, speculative=False, **more)
            assert result.token_ids == plain.token_ids
            accepted += len(plain.token_ids) - result.stats.rounds
            drafted.append(result.token_ids)
    assert accepted > 0
    first: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True} | ways[0]
    assert engine.generate(REPEATED, **first).token_ids == drafted[0]


COPY = dj.Plan(rows=2, block=4, max_length=128, prefix_cache=1 << 20, chunk=8, ngram=1)
# Prompts and options of requests.
CASES: list[tuple[list[int], dict[str, object]]] = [
    (REPEATED, {}),
    (REPEATED[:17], {"temperature": 0.8, "seed": 3}),
    ([1, 2, 3], {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "kind", "cases"),
    [
        pytest.param(tiny_target(), "dspark", CASES[:2], id="dspark"),
        pytest.param(tiny_hybrid(), "dflash2", CASES[:1], id="dflash2"),
        pytest.param(
            tiny_target(), "dspark", CASES[::2], id="dspark-penalized", marks=pytest.mark.soak
        ),
        pytest.param(
            tiny_hybrid(), "dflash2", CASES[1:], id="dflash2-sampled", marks=pytest.mark.soak
        ),
    ],
)
def test_copies_before_those_of_a_drafter_change_no_token(
    target: TargetConfig, kind: str, cases: list[tuple[list[int], dict[str, object]]]
) -> None:
    engine = random_engine(target, tiny_drafter(target, kind), COPY)
    copied = 0
    for prompt, options in cases:
        more = {"max_tokens": 40, "ignore_eos": True} | options
        results = engine.generate_many([prompt, [5, *prompt]], **more)
        for result, given in zip(results, (prompt, [5, *prompt]), strict=True):
            plain = engine.generate(given, speculative=False, **more)
            assert result.token_ids == plain.token_ids
            copied += result.stats.copied
    assert copied > 0
    again = engine.generate(REPEATED, max_tokens=40, ignore_eos=True)
    assert again.stats.cached_tokens > 0  # with the text of the prompt
    plain = engine.generate(REPEATED, max_tokens=40, ignore_eos=True, speculative=False)
    assert again.token_ids == plain.token_ids


def test_a_drafter_does_not_run_where_all_rows_copy() -> None:
    """A drafter that would be reported, since its numbers are not finite, is not even asked."""
    target = tiny_target()
    engine = random_engine(target, tiny_drafter(target), COPY)
    engine.params["drafter"] = jax.tree.map(lambda x: x * jnp.nan, engine.params["drafter"])
    every = [*range(target.vocab_size)]  # whatever follows occurred before
    result = engine.generate(every, max_tokens=2, ignore_eos=True, trace=True)
    assert result.stats.copied > 0
    assert not result.stats.fallbacks
    assert [step.copied for step in result.trace if step.proposed] == [True]
    result = engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True, trace=True)
    assert result.stats.copied == 0
    assert result.stats.fallbacks == {"draft_not_finite": 1}


@dataclasses.dataclass(frozen=True)
class Nines:
    """Drafts the token 9."""

    taps: tuple[int, ...] = ()

    def propose(
        self, params: None, state: tuple[()], anchor: jax.Array, *more: Any
    ) -> tuple[Draft, tuple[()]]:
        return more[-1].certain(jnp.full((len(anchor), more[-1].num_drafts), 9)), state


@pytest.mark.parametrize(
    ("limits", "ran"),
    [([99, 99], True), ([99, 0], False), ([0, 0], True)],
    ids=["one row copies", "all that draft copy", "none drafts, as while steps are timed"],
)
def test_the_drafter_runs_unless_all_rows_that_draft_copy(limits: list[int], ran: bool) -> None:
    """The first row's text has a match, the second one's has none."""
    text = jnp.array([[1, 2, 3, 1, 0, 0, 0, 0], [4, 5, 6, 7, 0, 0, 0, 0]])
    anchor, start = jnp.array([2, 8]), jnp.array([4, 4])
    one = jnp.ones(2, jnp.int32)
    rules = RowRules(-one[:, None], jnp.array(limits), 2 * one, *[one] * 5)
    sampler = RowDraftSampler(rules, anchor, start, 2, False, 10, "xla")
    copying = Copying(Nines(), NGram(least=1))
    draft, _ = copying.propose(None, ((), text), anchor, start, None, sampler)  # pyrefly: ignore
    assert draft.block[0, 1:].tolist() == [3, 1]
    assert (draft.block[1, 1:].tolist() == [9, 9]) == ran


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_states_with_texts_are_updated_in_place() -> None:
    target = tiny_target()
    plan = dataclasses.replace(COPY, prefix_cache=0)
    engine = random_engine(target, tiny_drafter(target), plan)
    engine.warm_up()
    for executable in engine.core.runner.executables.values():
        assert executable.aliased_bytes == executable.donated_bytes > 0
        assert executable.temporary_bytes <= budget(engine.graph).temporaries, executable.key


@pytest.mark.exhaustive
def test_a_grammar_may_be_followed_by_copies() -> None:
    engine = dj.load("tiny", plan=dj.Plan(ngram=2, max_length=256))
    engine.measures_drafting = False
    messages = [{"role": "user", "content": "List the numbers 1, 2, 3, 1, 2, 3, 1, 2 as JSON."}]
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12}
    options = {"max_tokens": 60, "structured": {"json": schema}}
    drafted = engine.chat(messages, **options)
    assert drafted.token_ids == engine.chat(messages, speculative=False, **options).token_ids
    assert drafted.stats.copied > 0


def test_reported_drafts_are_those_that_were_verified_whether_copied_or_not() -> None:
    tokens = jnp.array([[5, 6, 0, 0], [7, 0, 0, 0], [8, 0, 0, 0]])
    counts, drafts = jnp.array([2, 1, 1]), jnp.array([[6, 9, 4], [3, 4, 4], [2, 4, 4]])
    num_drafts = jnp.array([2 + COPIED, 1, -1])
    out = pack_output(tokens, counts, counts, jnp.ones(3, bool), num_drafts, drafts=drafts)
    assert np.asarray(out.packed)[:, 4:7].tolist() == [[6, 9, -1], [3, -1, -1], [-1, -1, -1]]
    [rows] = read_output(out)
    assert [(row.num_drafts, row.drafts, row.copied, row.draft_finite) for row in rows] == [
        (2, (6, 9), True, True),
        (1, (3,), False, True),
        (0, (), False, False),
    ]
