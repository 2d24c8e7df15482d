"""Depth per request: steps verify as many drafts as pay off, and no token depends on that."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.engine import break_even, scheduler
from dflash_jax.engine.break_even import Stopwatch, Timed
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine.speculation import NO_HISTORY, BreakEven, Drafting
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.steps.acceptance import frozen
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.native.build import library
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
COSTS = BreakEven((1,), (0,), (2, 4, 8), (((1.1, 1.3, 1.6),),))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_k": 20}
TARGET = tiny_target(num_layers=2, windows=(12, None))


def plan(rows: int = 1, **changes: Any) -> Plan:
    return Plan(rows=rows, max_length=160, chunk=16, block=BLOCK, **changes)


@functools.cache
def scripted() -> Engine:
    small: dict[str, Any] = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(TARGET, target_layer_ids=(0,), **small)
    engine = scripted_engine(random_engine(TARGET, drafter, plan(rows=3)))
    engine.warm_up("greedy", "sampled")
    return engine


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Let the numbers of drafts of successive calls and rows take turns; return those used."""
    used: set[int] = set()
    turns = itertools.cycle([1, 7, 2, 5, 3, 7, 4, 6])

    def choose(drafting: Mapping[int, Drafting], rows: int) -> dict[int, int]:
        assert len(drafting) <= rows
        chosen = {row: min(next(turns), x.most) for row, x in drafting.items()}
        used.update(chosen.values())
        return chosen

    monkeypatch.setattr(scheduler, "choose_drafts", choose)
    yield used
    assert used == {*range(1, BLOCK)}


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
def test_tokens_are_the_plain_ones_whatever_the_drafts(
    alternating: set[int], options: dict[str, Any]
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
    engine.warm_up("greedy")
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


def test_easy_and_hard_requests_of_a_step_draft_as_each_gains() -> None:
    engine = scripted()
    engine.core.meter.value, engine.core.acceptance = COSTS, NO_HISTORY
    set_script(engine, [])
    plain = engine.generate(PROMPT, max_tokens=NEW, speculative=False).token_ids
    of_rows(engine, [plain] * 3, [[7], [1], [7]])
    results = engine.generate_many([PROMPT] * 3, max_tokens=NEW)
    assert [x.token_ids for x in results] == [plain] * 3
    easy, hard, other = (x.stats.drafts_per_round for x in results)
    assert {*easy[:-1]} == {*other[:-1]} == {7}
    assert hard.count(1) + hard.count(2) > len(hard) / 2, hard
    engine.core.meter.use(BreakEven())


def test_all_drafts_are_verified_where_their_costs_are_unknown() -> None:
    engine = scripted()
    set_script(engine, [])
    for known in (BreakEven(), BreakEven.constant(0.5)):
        engine.core.meter.value, engine.core.acceptance = known, NO_HISTORY
        found = engine.generate(PROMPT, max_tokens=40)
        assert {*found.stats.drafts_per_round} == {7}
    engine.core.meter.use(BreakEven())


# -- measuring -------------------------------------------------------------------------------------


def test_blocks_are_timed_by_powers_of_two_where_drafts_that_are_not_made_cost_nothing() -> None:
    assert Stopwatch(scripted().core.runner).blocks == (2, 4, 8)
    assert Stopwatch(scripted().core.runner).rows == (1, 3)
    hybrid = random_engine(tiny_hybrid(), tiny_drafter(tiny_hybrid()), plan())
    xla = random_engine(TARGET, tiny_drafter(TARGET), plan(kernels="xla"))
    assert Stopwatch(hybrid.core.runner).rows == (1,)
    assert [Stopwatch(x.core.runner).blocks for x in (hybrid, xla)] == [(2, 4, 8), (8,)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafted steps cost as in `COSTS`, by any clock."""
    timed = Stopwatch.step_seconds

    def step_seconds(watch: Stopwatch, step: Timed) -> float:
        timed(watch, step)
        return 1.0 if step.block == 1 else COSTS.at(0, step.block)

    monkeypatch.setattr(Stopwatch, "step_seconds", step_seconds)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("clock")
def test_costs_are_measured_beforehand() -> None:
    engine = scripted()
    engine.time_drafting()
    value = engine.core.meter.value
    assert value.blocks == (2, 4, 8)
    for block, rows in itertools.product((2, 3, 4, 8), (1, 2, 3)):
        for place in (0, 50):
            assert value.at(place, block, rows) == pytest.approx(COSTS.at(0, block))
    engine.core.meter.use(BreakEven())


@pytest.mark.usefixtures("clock")
def test_measuring_goes_on_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted()
    monkeypatch.setattr(break_even, "FURTHER", 0)
    monkeypatch.setattr(break_even, "MARGIN", 0)
    meter = engine.core.meter
    meter.value = BreakEven()
    assert meter.measure(10, 1, 2)
    assert meter.measure(20, 0, 2)
    assert (meter.value.positions, meter.value.rows) == ((10, 20), (2,))
    assert meter.value.at(20, 2) == COSTS.at(0, 2)
    assert meter.measure(20, 0, 1)  # nothing is known about single rows
    assert (meter.value.positions, meter.value.rows) == ((20,), (1, 2))
    engine.core.meter.use(BreakEven())


def test_steps_are_timed_with_their_tokens_and_move_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of frozen rows are skipped, so that frozen rows would cost nothing."""
    engine = scripted()
    set_script(engine, [])
    engine.generate_many([PROMPT] * 3, max_tokens=5)
    runner = engine.core.runner
    before = [np.asarray(x).copy() for x in (runner.state.position, runner.state.anchor)]
    fed: list[int] = []
    run = runner.run

    def counted(key: ProgramKey, inputs: Any) -> Any:
        live = ~np.asarray(frozen(runner.state.anchor, runner.state.position, inputs.rules))
        drafts = np.asarray(inputs.rules.max_drafts) if key.step is Step.SPECULATIVE else 0
        fed.append(int((live * (1 + drafts)).sum()))
        return run(key, inputs)

    monkeypatch.setattr(runner, "run", counted)
    watch = Stopwatch(runner, row=2)
    for rows, block in ((1, 1), (3, 1), (1, 4), (3, 8)):
        fed.clear()
        assert watch.step_seconds(Timed(rows, block)) > 0
        assert {*fed} == {rows * block}
    after = [np.asarray(x) for x in (runner.state.position, runner.state.anchor)]
    assert all(map(np.array_equal, before, after))
