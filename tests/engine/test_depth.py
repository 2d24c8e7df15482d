"""Depth per request: steps verify as many drafts as pay off, and no token depends on that."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.engine import break_even, scheduler
from dflash_jax.engine.break_even import Stopwatch
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine.speculation import NO_HISTORY, BreakEven
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import LEAST
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    scripted_engine,
    set_row_scripts,
    set_script,
    tiny_drafter,
    tiny_hybrid,
    tiny_target,
)

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernels: {library().reason}")

PROMPT, NEW, BLOCK = [3, 1, 4, 1, 5], 120, 8
COSTS = BreakEven((0,), (1.6,), ((2, (1.1,)), (3, (1.25,)), (4, (1.3,))))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_k": 20}
SPECULATIVE = ProgramKey(Step.SPECULATIVE, Variant.GREEDY)
TARGET = tiny_target(num_layers=2, windows=(12, None))


def plan(rows: int = 1, **changes: Any) -> Plan:
    return Plan(rows=rows, max_length=160, chunk=16, block=BLOCK, **changes)


@functools.cache
def scripted() -> Engine:
    small: dict[str, Any] = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(TARGET, target_layer_ids=(0,), **small)
    engine = scripted_engine(random_engine(TARGET, drafter, plan(rows=3)))
    engine.warm_up("greedy", "sampled", "depth")
    return engine


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the blocks of successive calls take turns; return those that were used."""
    used: list[int] = []
    turns = itertools.cycle([2, 8, 3, 4, 8, 2])

    def choose(rows: Any, blocks: Sequence[int]) -> int:
        assert blocks == [2, 3, 4, 8]
        used.append(next(turns))
        return used[-1]

    monkeypatch.setattr(scheduler, "choose_block", choose)
    yield used
    assert {*used} == {2, 3, 4, 8}


def narrower(engine: Engine) -> list[ProgramKey]:
    return [x for x in engine.core.runner.compiled.programs if Variant.DEPTH in x.needed_by]


def of_rows(engine: Engine, answers: Sequence[list[int]], patterns: Sequence[list[int]]) -> None:
    """Make rows, which get the prompts in their order, accept drafts by patterns."""
    vocab = engine.graph.config.vocab_size
    scripts = {
        row: force_acceptance([*PROMPT, *answer], len(PROMPT), pattern, vocab)
        for row, (answer, pattern) in enumerate(zip(answers, patterns, strict=True))
    }
    set_row_scripts(engine, scripts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_the_plain_ones_whatever_the_blocks(
    alternating: list[int], options: dict[str, Any]
) -> None:
    """Several rows, more requests than rows, one of them drafting less, one of them plainly."""
    engine = scripted()
    set_script(engine, [])
    prompts = [PROMPT, list(range(40)), [7], PROMPT, [9] * 17]
    each = [{}, {"block_size": 3}, {"speculative": False}, {}, {}]

    def run(**changes: Any) -> list[list[int]]:
        handles = [
            engine.submit(prompt, max_tokens=60 + 5 * i, **options | own | changes)
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        return [handle.result().token_ids for handle in handles]

    plain = run(speculative=False)
    before = dict(engine.core.runner.executables)
    of_rows(engine, [plain[0]] * 3, [[7, 7, 0, 1, 3], [2], [0]])
    with jax.no_tracing():
        assert run() == plain
    assert engine.core.runner.executables == before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["dspark", "ngram", pytest.param("dflash2", marks=pytest.mark.soak)]
)
@pytest.mark.usefixtures("alternating")
def test_every_drafter_may_draft_less(kind: str) -> None:
    if kind == "ngram":
        alone, one = random_engine(TARGET, None, plan()), plan(steps_per_call=1)
        graph = Graph(Pair(target=alone.graph.pair.target, drafter=NGram()), one)
        engine = Engine(graph, alone.params | {"drafter": {}})
        assert graph.plan.lookahead  # a block is chosen while another one is in flight
    else:
        engine = random_engine(TARGET, tiny_drafter(TARGET, kind, windows=(12, None)), plan())
    engine.warm_up("greedy", "depth")
    text = PROMPT * 6
    plain = engine.generate(text, max_tokens=60, speculative=False)
    found = engine.generate(text, max_tokens=60)
    assert found.token_ids == plain.token_ids
    assert max(found.stats.drafts_per_round) == BLOCK - 1
    assert min(found.stats.drafts_per_round) <= 1


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_verifies_fewer_drafts_where_fewer_are_accepted_and_more_again(
    options: dict[str, Any],
) -> None:
    engine = scripted()
    engine.core.meter.value, engine.core.acceptance = COSTS, NO_HISTORY
    set_script(engine, [])
    plain = engine.generate(PROMPT, max_tokens=150, speculative=False, **options).token_ids
    tokens, vocab = [*PROMPT, *plain], engine.graph.config.vocab_size
    hard = force_acceptance(tokens, len(PROMPT), [1], vocab)
    set_script(engine, [*hard[:70], *tokens[70:]])  # and then every draft is right
    found = engine.generate(PROMPT, max_tokens=150, trace=True, **options)
    assert found.token_ids == plain
    counts = found.stats.drafts_per_round
    assert counts[0] == 7
    assert 1 in counts
    assert counts[-2] == 7
    rounds = [x for x in found.trace if x.proposed]
    assert [x.proposed for x in rounds] == counts
    assert found.stats.drafted == sum(counts)
    engine.core.meter.use(BreakEven())


def test_easy_and_hard_requests_share_the_block_that_pays_off_most_in_total() -> None:
    engine = scripted()
    engine.core.meter.value, engine.core.acceptance = COSTS, NO_HISTORY
    set_script(engine, [])
    plain = engine.generate(PROMPT, max_tokens=NEW, speculative=False).token_ids

    def run(*patterns: list[int]) -> list[list[int]]:
        of_rows(engine, [plain] * 3, patterns)
        engine.core.acceptance = NO_HISTORY
        results = engine.generate_many([PROMPT] * 3, max_tokens=NEW)
        assert [x.token_ids for x in results] == [plain] * 3
        return [x.stats.drafts_per_round for x in results]

    hard = run([1], [1], [1])
    assert all(counts.count(1) > len(counts) / 2 for counts in hard)
    mixed = run([7], [7], [1])
    assert {*mixed[0]} == {*mixed[1]} == {7}
    engine.core.meter.use(BreakEven())


def test_whole_blocks_are_verified_where_the_cost_of_others_is_unknown() -> None:
    engine = scripted()
    set_script(engine, [])
    for known in (BreakEven(), BreakEven((0,), (0.5,))):
        engine.core.meter.value, engine.core.acceptance = known, NO_HISTORY
        found = engine.generate(PROMPT, max_tokens=40)
        assert {*found.stats.drafts_per_round} == {7}
    engine.core.meter.use(BreakEven())


# -- programs --------------------------------------------------------------------------------------


def test_narrower_blocks_are_programs_of_their_own_that_update_the_state_in_place() -> None:
    engine = scripted()
    made = engine.core.runner.executables
    whole = made[SPECULATIVE]
    for variant, block in itertools.product((Variant.GREEDY, Variant.SAMPLED), (2, 3, 4)):
        key = ProgramKey(Step.SPECULATIVE, variant, block)
        assert ProgramKey.parse(str(key)) == key
        assert key.needed_by == (Variant.DEPTH,)
        assert made[key].aliased_bytes == made[key].donated_bytes == whole.donated_bytes
        _, _, out = jax.eval_shape(
            engine.core.runner.compiled.programs[key].function,
            *engine.core.runner.compiled.programs[key].arguments,
        )
        assert out.packed.shape[-1] == block + 5
    assert made[SPECULATIVE._replace(block=2)].temporary_bytes <= whole.temporary_bytes
    assert engine.core.runner.blocks(Variant.SAMPLED) == [2, 3, 4, BLOCK]
    assert engine.core.runner.blocks(Variant.PENALIZED) == [BLOCK]
    text = engine.graph.explain()
    assert "speculative[greedy,4]" in str(text)
    work = {program.name: program.work for program in text.programs}
    narrow, full = (work[f"speculative[greedy{x}]"] for x in (",2", ""))
    assert narrow is not None
    assert full is not None
    assert narrow.flops < full.flops


def test_plans_whose_bits_depend_on_the_width_have_no_narrower_blocks() -> None:
    for target, changes in (
        (tiny_hybrid(), {}),
        (TARGET, {"kernels": "xla"}),
        (TARGET, {"kernels": "xla", "exact": False}),
        (TARGET, {"plain_width": BLOCK}),
    ):
        engine = random_engine(target, tiny_drafter(target), plan(**changes))
        assert engine.plan.narrower == ()
        assert not narrower(engine)
        assert engine.core.runner.compiled.wanted(Variant.DEPTH)  # there are none to compile
        assert engine.core.runner.blocks(Variant.GREEDY) == [BLOCK]


def test_narrower_blocks_are_3_and_powers_of_two() -> None:
    found = {n: dataclasses.replace(LEAST, block=n).narrower for n in (2, 3, 4, 6, 8, 16)}
    wide = {6: (2, 3, 4), 8: (2, 3, 4), 16: (2, 3, 4, 8)}
    assert found == {2: (), 3: (2,), 4: (2, 3)} | wide
    assert dataclasses.replace(LEAST, block=8, plain_width=8).narrower == ()
    alone = random_engine(TARGET, None, plan())  # without a drafter there is no block
    assert not narrower(alone)


# -- compiling and measuring -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafted steps cost as in `COSTS`, by any clock."""
    timed = Stopwatch.step_seconds

    def step_seconds(watch: Stopwatch, step: Step, block: int = 0) -> float:
        timed(watch, step, block)
        return 1.0 if step is Step.PLAIN else COSTS.at(0, block)

    monkeypatch.setattr(Stopwatch, "step_seconds", step_seconds)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("clock")
def test_narrower_blocks_are_compiled_for_the_request_after_one_that_gains_little() -> None:
    small: dict[str, Any] = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(TARGET, target_layer_ids=(0,), **small)
    engine = scripted_engine(random_engine(TARGET, drafter, plan()))
    compiled, meter = engine.core.runner.compiled, engine.core.meter
    engine.warm_up()
    few = {*engine.core.runner.executables}
    plain = engine.generate(PROMPT, max_tokens=NEW, speculative=False).token_ids
    tokens, vocab = [*PROMPT, *plain], engine.graph.config.vocab_size

    def run(accepted: int) -> Any:
        set_script(engine, force_acceptance(tokens, len(PROMPT), [accepted], vocab))
        found = engine.generate(PROMPT, max_tokens=NEW)
        assert found.token_ids == plain
        return found.stats

    set_script(engine, [0] * 160)
    engine.generate(PROMPT, max_tokens=NEW)
    assert not engine._optional_variants()  # nothing is measured, as nobody asked for it
    engine.core.acceptance, engine.measures_drafting = NO_HISTORY, True
    run(7)
    assert not meter.doubted
    assert {*engine.core.runner.executables} == few  # so start-up is as fast as before
    run(1)
    assert meter.doubted
    assert meter.value == COSTS._replace(positions=meter.value.positions, narrower=())
    assert {*engine.core.runner.executables} == few
    stats = run(1)
    assert stats.compile_s > 0
    assert {*engine.core.runner.executables} - few == {
        SPECULATIVE._replace(block=block) for block in (2, 3, 4)
    }  # sampled ones once a request samples
    assert meter.value == COSTS._replace(positions=meter.value.positions)
    assert stats.drafts_per_round.count(1) > 5
    assert run(1).compile_s == 0
    assert meter.value.positions[0] < len(PROMPT) + 16  # at once
    assert compiled.wanted(Variant.DEPTH)
    engine.warm_up("sampled")
    assert not compiled.wanted(Variant.DEPTH)
    engine.measures_drafting = False


@pytest.mark.exhaustive
@pytest.mark.usefixtures("clock")
def test_costs_are_measured_beforehand_where_programs_are_compiled() -> None:
    engine = scripted()
    engine.time_drafting()
    value = engine.core.meter.value
    assert [block for block, _ in value.narrower] == [2, 3, 4]
    for block in (2, 3, 4, None):
        assert [value.at(place, block) for place in (0, 50)] == [COSTS.at(0, block)] * 2
    engine.core.meter.use(BreakEven())


@pytest.mark.usefixtures("clock")
def test_measuring_goes_on_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted()
    monkeypatch.setattr(break_even, "FURTHER", 0)
    monkeypatch.setattr(break_even, "MARGIN", 0)
    meter = engine.core.meter
    meter.value = BreakEven((4,), (9.0,))  # measured before the narrower ones were compiled
    assert meter.measure(10)
    assert meter.value == COSTS._replace(positions=(10,))
    assert meter.measure(20)
    assert meter.value.positions == (10, 20)
    assert meter.value.at(20, 2) == COSTS.at(0, 2)
    engine.core.meter.use(BreakEven())
