"""Prompts are fed in chunks of several widths, and no bit depends on that."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.engine import engine as engines
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.native.build import library
from dflash_jax.testing import random_engine, tiny_drafter, tiny_hybrid, tiny_target

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not library(), reason=f"no native kernels: {library().reason}"),
]

CHUNK, WIDTHS = 16, (8, 64, 128)
TARGET = tiny_target(num_layers=2)
SLIDING = tiny_target(num_layers=2, windows=(12, None))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
PREFILL = ProgramKey(Step.PREFILL, Variant.GREEDY)


def make(target: Any = TARGET, **changes: Any) -> Engine:
    drafter = tiny_drafter(
        target, target_layer_ids=(0,), num_layers=1, windows=(12,), causal=(False,)
    )
    fields = {"max_length": 320, "chunk": CHUNK, "block": 4, "prefix_cache": 0} | changes
    return random_engine(target, drafter, Plan(rows=2, **fields))


@functools.cache
def chunked(target: Any = TARGET, *, prefix_cache: int = 0) -> Engine:
    engine = make(target, prefix_cache=prefix_cache)
    engine.warm_up("greedy", "sampled", "chunks")
    return engine


@functools.cache
def usual(target: Any = TARGET) -> Engine:
    return make(target)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the widths of the prefill calls that are made, 0 for the plan's."""
    widths: list[int] = []
    run = ModelRunner.run

    def noted(runner: ModelRunner, key: ProgramKey, inputs: Any) -> Any:
        if key.step == Step.PREFILL:
            widths.append(key.block)
        return run(runner, key, inputs)

    monkeypatch.setattr(ModelRunner, "run", noted)
    return widths


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("length", "widths"),
    [
        (1, [8]),
        (8, [8]),
        (9, [0]),
        (16, [0]),
        (17, [0, 8]),
        (63, [0, 0, 0, 0]),
        (65, [64, 8]),
        (129, [128, 8]),
        (215, [128, 64, 0, 8]),
    ],
)
def test_a_prompt_is_fed_in_the_widest_calls_and_its_end_in_the_narrowest(
    fed: list[int], options: dict[str, Any], length: int, widths: list[int]
) -> None:
    engine, ids = chunked(), prompt(length)
    expected = usual().generate(ids, max_tokens=12, **options).token_ids
    assert {*fed} == {0}
    fed.clear()
    with jax.no_tracing():
        assert engine.generate(ids, max_tokens=12, **options).token_ids == expected
    assert fed == widths


def test_wide_calls_decide_greedy_tokens_only(fed: list[int]) -> None:
    for options, widths in (({}, [64]), (SAMPLED, [0] * 4)):
        expected = usual().generate(prompt(64), max_tokens=12, **options).token_ids
        fed.clear()
        assert chunked().generate(prompt(64), max_tokens=12, **options).token_ids == expected
        assert fed == widths


def test_a_drafter_has_rings_only_beside_a_target_that_has_them() -> None:
    """Rings of its own would save little, and rule out wider calls."""
    for target, rings, widths in ((TARGET, [False], WIDTHS), (SLIDING, [True], WIDTHS[:1])):
        planned = make(target).graph
        assert [cache.ring for cache in planned.state.drafter] == rings
        assert planned.chunks == widths


def test_caches_have_the_bits_of_the_usual_chunks() -> None:
    states = []
    for engine in (usual(), chunked()):
        engine.generate(prompt(215), max_tokens=1)
        states.append(engine.core.runner.state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.ndim == 4:  # keys and values [B, K, S, H] of target and drafter
            one, other = one[:, :, :215], other[:, :, :215]
        np.testing.assert_array_equal(one, other)


def test_wide_calls_never_hold_up_rows_that_decode(fed: list[int]) -> None:
    engine, ids = chunked(), prompt(140)
    alone = usual().generate(ids, max_tokens=10).token_ids
    fed.clear()
    first = engine.submit([7] * 5, max_tokens=60)
    while not first.sequence.state.num_decided:
        engine.advance()
    fed.clear()
    second = engine.submit(ids, max_tokens=10)
    assert second.result().token_ids == alone
    assert fed == [0] * 8 + [0]  # 12 tokens at the end
    first.result()
    fed.clear()
    assert engine.generate(ids, max_tokens=10).token_ids == alone
    assert fed == [128, 0]


def test_prompts_share_the_tokens_of_a_wide_call(fed: list[int]) -> None:
    engine, prompts = chunked(), [prompt(200, seed=3), prompt(140, seed=4)]
    alone = [usual().generate(ids, max_tokens=10).token_ids for ids in prompts]
    fed.clear()
    found = engine.generate_many(prompts, max_tokens=10)
    assert [x.token_ids for x in found] == alone
    assert fed[:4] == [64, 64, 64, 64]
    assert 128 not in fed


def test_rows_with_one_prompt_share_wide_calls(fed: list[int]) -> None:
    ids = prompt(150)
    alone = [usual().generate(ids, max_tokens=8, **SAMPLED | {"seed": s}) for s in (5, 6)]
    fed.clear()
    engine = chunked()
    handles = engine.enqueue(engine.prepare(ids, n=2, max_tokens=8, **SAMPLED))
    assert [x.result().token_ids for x in handles] == [x.token_ids for x in alone]
    assert fed == [64, 64, 0, 8, 8]  # the second row copies what the first was fed


def test_wide_calls_fill_the_prefix_cache_chunk_by_chunk(fed: list[int]) -> None:
    engine, ids = chunked(prefix_cache=1 << 24), prompt(215, seed=1)
    expected = usual().generate(ids, max_tokens=8).token_ids
    assert engine.generate(ids, max_tokens=8).token_ids == expected
    fed.clear()
    again = engine.generate(ids, max_tokens=8)
    assert (again.token_ids, again.stats.cached_tokens) == (expected, 208)
    assert fed == [8]
    other = [*ids[:80], *prompt(100, seed=2)]  # leaves the cached text within a wide call
    fed.clear()
    expected = usual().generate(other, max_tokens=8).token_ids
    fed.clear()
    found = engine.generate(other, max_tokens=8)
    assert (found.token_ids, found.stats.cached_tokens) == (expected, 80)
    assert fed == [64, 0, 0, 8]


def test_other_requests_take_the_chunks_that_their_programs_have(fed: list[int]) -> None:
    ids = prompt(150)
    plain = usual().generate(ids, max_tokens=4, presence_penalty=0.5).token_ids
    fed.clear()
    assert chunked().generate(ids, max_tokens=4, presence_penalty=0.5).token_ids == plain
    assert fed == [128, 0, 0]  # the end decides a token, for which there is no narrow program
    fed.clear()
    scored = chunked().generate(ids, max_tokens=4, prompt_logprobs=1)
    assert fed == [0] * 10
    expected = usual().generate(ids, max_tokens=4, prompt_logprobs=1)
    assert scored.prompt_logprobs == expected.prompt_logprobs


# -- programs --------------------------------------------------------------------------------------


def test_chunks_are_programs_of_their_own_that_update_the_state_in_place() -> None:
    made = chunked().core.runner.executables
    keys = [key for key in made if key.step == Step.PREFILL and key.block]
    sampled = PREFILL._replace(variant=Variant.SAMPLED, block=8)
    assert {*keys} == {sampled, *(PREFILL._replace(block=width) for width in WIDTHS)}
    for key in keys:
        assert ProgramKey.parse(str(key)) == key
        assert key.needed_by == (Variant.CHUNKS,)
        assert made[key].aliased_bytes == made[key].donated_bytes == made[PREFILL].donated_bytes
        text = str(chunked().graph.explain())
        assert str(key) in text
    assert made[PREFILL._replace(block=8)].temporary_bytes <= made[PREFILL].temporary_bytes


def test_where_bits_or_caches_depend_on_the_width_there_are_fewer() -> None:
    assert chunked().graph.chunks == WIDTHS
    assert make(SLIDING).graph.chunks == (8,)  # rings keep no chunks to cut
    assert make(SLIDING, rings=False).graph.chunks == WIDTHS
    assert make(max_length=128).graph.chunks == (8, 64)
    assert make(chunk=8).graph.chunks == (32, 64)
    assert make(draft_window=24).graph.chunks == (8,)
    for target, changes in ((tiny_hybrid(), {}), (TARGET, {"kernels": "xla"})):
        engine = random_engine(target, None, Plan(max_length=320, chunk=CHUNK, **changes))
        assert engine.graph.chunks == ()
        assert engine.core.runner.compiled.wanted(Variant.CHUNKS)  # there are none to compile


def test_narrow_ends_leave_rings_as_they_were(fed: list[int]) -> None:
    ids = prompt(101)
    expected = usual(SLIDING).generate(ids, max_tokens=12).token_ids
    fed.clear()
    assert chunked(SLIDING).generate(ids, max_tokens=12).token_ids == expected
    assert fed == [0] * 6 + [8]


def test_a_graph_feeds_prompts_by_the_programs_that_it_compiled() -> None:
    made = usual()
    pair = Pair(made.graph.pair.target, NGram())
    graph = Graph(pair, Plan(max_length=320, chunk=CHUNK, block=4))
    assert graph.chunks == WIDTHS
    params, ids = graph.place_params(made.params | {"drafter": {}}), prompt(215)
    found = []
    for more in ([], ["prefill[greedy,128]", "prefill[greedy,8]"]):
        programs = graph.compile(["prefill", "speculative", *more])
        state, out = programs.prefill(params, graph.init_state(), ids)
        tokens = out.tokens[0]
        while len(tokens) < 12:
            state, out = programs.speculative(params, state)
            tokens += out.tokens[0]
        found.append(tokens[:12])
    assert found[0] == found[1] == made.generate(ids, max_tokens=12).token_ids


def test_chunks_are_compiled_once_they_would_have_spared_enough(
    monkeypatch: pytest.MonkeyPatch, fed: list[int]
) -> None:
    monkeypatch.setattr(engines, "AVOIDABLE_TOKENS", 20)
    engine = make()
    engine.warm_up()
    engine.measures_drafting = True  # as engines of `dj.load` do
    few = {*engine.core.runner.executables}
    engine.generate(prompt(16), max_tokens=1)  # a whole chunk
    engine.generate(prompt(3), max_tokens=1)
    assert engine.core.runner.avoidable_tokens == 8
    engine.generate(prompt(65), max_tokens=1)  # 4 of each of 4 whole chunks... and the end
    assert {*engine.core.runner.executables} == few
    assert {*fed} == {0}
    found = engine.generate(prompt(65), max_tokens=1)
    assert found.stats.compile_s > 0
    assert {*engine.core.runner.executables} - few == {
        PREFILL._replace(block=width) for width in WIDTHS
    }
    assert fed[-2:] == [64, 8]
    assert engine.generate(prompt(65), max_tokens=1).stats.compile_s == 0
