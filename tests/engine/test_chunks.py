"""Prompts are fed in calls of several chunks where nobody waits, and no bit depends on that."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.engine import engine as engines
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.graph import abstract
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.native.build import library
from dflash_jax.testing import random_engine, tiny_drafter, tiny_hybrid, tiny_target

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernels: {library().reason}")

CHUNK, WIDE, SLOTS = 16, 64, 320  # four chunks, for small engines
TARGET = tiny_target(num_layers=2)
SLIDING = tiny_target(num_layers=2, windows=(12, None))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.9}


def make(target: Any = TARGET, **changes: Any) -> Engine:
    drafter = tiny_drafter(
        target, target_layer_ids=(0,), num_layers=1, windows=(12,), causal=(False,)
    )
    fields = {"max_length": SLOTS, "chunk": CHUNK, "block": 4, "prefix_cache": 0} | changes
    return random_engine(target, drafter, Plan(rows=2, **fields))


@pytest.fixture(autouse=True)
def four_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abstract, "JOINED", WIDE // CHUNK)


@functools.cache
def wide(*, prefix_cache: int = 0) -> Engine:
    engine = make(prefix_cache=prefix_cache)
    assert engine.graph.wide_prefill == WIDE
    engine.warm_up("greedy", "sampled", "chunks")
    return engine


@functools.cache
def narrow() -> Engine:
    """Return the same engine without wide calls."""
    return make()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens that prefill calls feed."""
    counts: list[int] = []
    run = ModelRunner.run

    def noted(runner: ModelRunner, key: Any, inputs: Any) -> Any:
        if key.step in (Step.PREFILL, Step.PREFILL_WIDE):
            counts.append(int(np.asarray(inputs.num_tokens).sum()))
        return run(runner, key, inputs)

    monkeypatch.setattr(ModelRunner, "run", noted)
    return counts


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("length", "widths"),
    [
        pytest.param(1, [1], marks=pytest.mark.exhaustive),
        pytest.param(32, [16, 16], marks=pytest.mark.exhaustive),
        (33, [33]),
        pytest.param(64, [64], marks=pytest.mark.exhaustive),
        (308, [64, 64, 64, 64, 52]),
    ],
)
def test_long_prompts_are_fed_in_wide_calls(
    fed: list[int], options: dict[str, Any], length: int, widths: list[int]
) -> None:
    engine, ids = wide(), prompt(length)
    most = min(12, SLOTS - length)
    expected = narrow().generate(ids, max_tokens=most, **options).token_ids
    assert max(fed) <= CHUNK
    fed.clear()
    with jax.no_tracing():
        assert engine.generate(ids, max_tokens=most, **options).token_ids == expected
    assert fed == widths


@pytest.mark.exhaustive
def test_wide_calls_leave_the_token_after_a_prompt_to_steps_that_process_logits(
    fed: list[int],
) -> None:
    ids, options = prompt(308), {"max_tokens": 12, "presence_penalty": 0.5}
    expected = narrow().generate(ids, **options).token_ids
    fed.clear()
    assert wide().generate(ids, **options).token_ids == expected
    assert fed == [64, 64, 64, 64, 51, 1]


def test_caches_have_the_bits_of_narrow_calls() -> None:
    states = []
    for engine in (narrow(), wide()):
        engine.generate(prompt(300), max_tokens=1)
        states.append(engine.core.runner.state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.ndim == 4:  # keys and values [B, K, S, H] of target and drafter
            one, other = one[:1, :, :300], other[:1, :, :300]
        np.testing.assert_array_equal(one[:1], other[:1])


def test_wide_calls_never_hold_up_rows_that_decode(fed: list[int]) -> None:
    engine, ids = wide(), prompt(140)
    alone = narrow().generate(ids, max_tokens=10).token_ids
    first = engine.submit([7] * 5, max_tokens=60)
    while not first.sequence.state.num_decided:
        engine.advance()
    fed.clear()
    second = engine.submit(ids, max_tokens=10)
    assert second.result().token_ids == alone
    assert fed == [CHUNK] * 8 + [12]
    first.result()
    fed.clear()
    assert engine.generate(ids, max_tokens=10).token_ids == alone
    assert fed == [64, 64, 12]


def test_prompts_share_the_tokens_of_a_wide_call(fed: list[int]) -> None:
    engine, prompts = wide(), [prompt(200, seed=3), prompt(140, seed=4)]
    alone = [narrow().generate(ids, max_tokens=10).token_ids for ids in prompts]
    fed.clear()
    found = engine.generate_many(prompts, max_tokens=10)
    assert [x.token_ids for x in found] == alone
    assert fed[:4] == [64] * 4  # in turn


@pytest.mark.exhaustive
def test_rows_with_one_prompt_share_wide_calls(fed: list[int]) -> None:
    ids, engine = prompt(150), wide()
    alone = [narrow().generate(ids, max_tokens=8, **SAMPLED | {"seed": s}) for s in (5, 6)]
    fed.clear()
    handles = engine.enqueue(engine.prepare(ids, n=2, max_tokens=8, **SAMPLED))
    assert [x.result().token_ids for x in handles] == [x.token_ids for x in alone]
    assert sum(fed) < 2 * len(ids)  # the second row copies what the first was fed


def test_wide_calls_fill_the_prefix_cache_chunk_by_chunk(fed: list[int]) -> None:
    engine, ids = wide(prefix_cache=1 << 24), prompt(215, seed=1)
    expected = narrow().generate(ids, max_tokens=8).token_ids
    assert engine.generate(ids, max_tokens=8).token_ids == expected
    fed.clear()
    again = engine.generate(ids, max_tokens=8)
    assert (again.token_ids, again.stats.cached_tokens) == (expected, 208)
    assert fed == [7]
    other = [*ids[:80], *prompt(100, seed=2)]  # leaves the cached text within a wide call
    expected = narrow().generate(other, max_tokens=8).token_ids
    fed.clear()
    found = engine.generate(other, max_tokens=8)
    assert (found.token_ids, found.stats.cached_tokens) == (expected, 80)
    assert fed == [64, 36]


@pytest.mark.exhaustive
def test_prompts_with_log_probabilities_are_fed_by_chunks(fed: list[int]) -> None:
    ids = prompt(150)
    scored = wide().generate(ids, max_tokens=4, prompt_logprobs=1)
    assert fed == [CHUNK] * 9 + [6]
    expected = narrow().generate(ids, max_tokens=4, prompt_logprobs=1)
    assert scored.prompt_logprobs == expected.prompt_logprobs


def test_there_are_wide_calls_where_neither_bits_nor_caches_depend_on_them() -> None:
    assert make(SLIDING).graph.wide_prefill == 0  # rings keep no chunks to cut
    assert make(SLIDING, rings=False).graph.wide_prefill == WIDE
    assert make(max_length=WIDE).graph.wide_prefill == 0
    assert make(draft_window=24).graph.wide_prefill == 0
    assert [cache.ring for cache in wide().graph.state.drafter] == [False]  # as the target's
    assert [cache.ring for cache in make(SLIDING).graph.state.drafter] == [True]
    planned = wide().graph
    assert [planned.wide_part(0, n) for n in (32, 33, 64, 90)] == [0, 33, 64, 64]
    processed = [planned.wide_part(0, n, Variant.PENALIZED) for n in (33, 34, 64, 90)]
    assert processed == [0, 33, 63, 64]  # steps that process logits decide the token after it
    assert planned.wide_part(planned.plan.slots - WIDE, 40) == 40
    assert planned.wide_part(planned.plan.slots - WIDE + 1, 40) == 0  # past the end of the caches
    for target, changes in ((tiny_hybrid(), {}), (TARGET, {"kernels": "xla"})):
        engine = random_engine(target, None, Plan(max_length=SLOTS, chunk=CHUNK, **changes))
        assert engine.graph.wide_prefill == 0
        assert engine.core.runner.compiled.wanted(Variant.CHUNKS)  # there are none to compile


def test_a_wide_call_is_a_program_of_its_own_that_updates_the_state_in_place() -> None:
    made = wide().core.runner.executables
    key, usual = ProgramKey(Step.PREFILL_WIDE), wide().graph.key(Step.PREFILL)
    assert ProgramKey.parse(str(key)) == key
    assert made[key].aliased_bytes == made[key].donated_bytes == made[usual].donated_bytes
    assert str(key) in str(wide().graph.explain())


@pytest.mark.exhaustive
def test_wide_calls_are_compiled_once_they_would_have_been_worth_it(
    monkeypatch: pytest.MonkeyPatch, fed: list[int]
) -> None:
    monkeypatch.setattr(engines, "SLOW_TOKENS", 4 * CHUNK)
    engine = make()
    for length in (16, 32, 64):
        engine.generate(prompt(length), max_tokens=1)
    assert ProgramKey(Step.PREFILL_WIDE) not in engine.core.runner.executables
    engine.generate(prompt(100), max_tokens=1)
    assert max(fed) == CHUNK
    assert engine.generate(prompt(100), max_tokens=1).stats.compile_s > 0
    assert fed[-2:] == [64, 36]
    assert engine.generate(prompt(100), max_tokens=1).stats.compile_s == 0


def test_a_graph_feeds_prompts_by_the_programs_that_it_compiled() -> None:
    made = narrow()
    pair = Pair(made.graph.pair.target, NGram())
    graph = Graph(pair, Plan(max_length=SLOTS, chunk=CHUNK, block=4))
    params, ids = graph.place_params(made.params | {"drafter": {}}), prompt(215)
    found = []
    for more in ([], ["prefill_wide"]):
        programs = graph.compile(["prefill", "speculative", *more])
        state, out = programs.prefill(params, graph.init_state(), ids)
        tokens = out.tokens[0]
        while len(tokens) < 12:
            state, out = programs.speculative(params, state)
            tokens += out.tokens[0]
        found.append(tokens[:12])
    assert found[0] == found[1] == made.generate(ids, max_tokens=12).token_ids
