"""Requests measure what drafting gains while they run; no token depends on it."""

import functools
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax import Plan
from dflash_jax.engine import break_even
from dflash_jax.engine.break_even import Stopwatch, Timed
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import speculation
from dflash_jax.engine.state_machine.speculation import NO_HISTORY, TRIAL, BreakEven
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_hybrid,
    tiny_target,
)

pytestmark = pytest.mark.exhaustive

PROMPT, NEW = [3, 1, 4, 1, 5], 90
TARGETS = {
    "qwen3": tiny_target,
    "sliding": functools.partial(tiny_target, windows=(12, None, 12)),
    "recurrent": tiny_hybrid,
}


@functools.cache
def make(name: str, rows: int = 1) -> Engine:
    target = TARGETS[name]()
    plan = Plan(rows=rows, max_length=160, chunk=16, block=4)
    return scripted_engine(random_engine(target, tiny_drafter(target), plan))


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafted steps cost as much as three plain ones, by any clock."""
    timed = Stopwatch.step_seconds

    def step_seconds(watch: Stopwatch, step: Timed) -> float:
        timed(watch, step)
        return 3.0 if step.block > 1 else 1.0

    monkeypatch.setattr(Stopwatch, "step_seconds", step_seconds)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("costly")
def test_measuring_changes_no_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows stay as they are meanwhile, at any position and next to prompts that are being fed."""
    engine = make(name, rows=2)
    set_script(engine, [])
    prompts = [PROMPT, list(range(40)), [7]]
    plain = [engine.generate(p, max_tokens=NEW, speculative=False).token_ids for p in prompts]
    monkeypatch.setattr(break_even, "FURTHER", 0)  # measures after every step
    monkeypatch.setattr(break_even, "MARGIN", 0)
    monkeypatch.setattr(speculation, "TRIAL", 1)
    engine.core.meter.value, engine.measures_drafting = BreakEven(), True
    results = engine.generate_many(prompts, max_tokens=NEW)
    assert [result.token_ids for result in results] == plain
    assert len(engine.core.meter.value.positions) > 3
    assert sum(result.stats.fallbacks["below_break_even"] for result in results) > 0
    engine.measures_drafting = False


@pytest.mark.usefixtures("costly")
def test_a_request_stops_drafting_where_it_loses() -> None:
    engine = make("qwen3")
    plain = engine.generate(PROMPT, max_tokens=NEW, speculative=False).token_ids
    sampled: dict[str, Any] = {"seed": 5, "temperature": 1.0}
    drawn = engine.generate(PROMPT, max_tokens=NEW, speculative=False, **sampled).token_ids
    tokens = [*PROMPT, *plain]
    vocab = engine.graph.config.vocab_size

    def run(accepted: int, **options: Any) -> Any:
        engine.core.meter.value, engine.measures_drafting = BreakEven(), True
        engine.core.acceptance = NO_HISTORY
        set_script(engine, force_acceptance(tokens, len(PROMPT), [accepted], vocab))
        found = engine.generate(PROMPT, max_tokens=NEW, **options)
        assert found.token_ids == (drawn if options else plain)
        return found.stats

    lost = run(1)
    assert lost.rounds <= 2 * TRIAL  # a call makes several
    assert lost.plain_steps >= NEW - 4 * TRIAL
    assert engine.core.meter.value.at(0) == 3.0
    won = run(3)  # accepted nearly always: nothing is measured
    assert (won.plain_steps, engine.core.meter.value) == (0, BreakEven())
    seeded = run(1, **sampled)  # whose tokens depend on no mode either
    assert seeded.plain_steps >= NEW - 4 * TRIAL
    assert engine.core.meter.value.at(0) == 3.0
    engine.measures_drafting = False
    engine.core.meter.use(BreakEven())
    set_script(engine, force_acceptance(tokens, len(PROMPT), [1], vocab))
    assert engine.generate(PROMPT, max_tokens=NEW).stats.plain_steps == 0


@pytest.mark.usefixtures("costly")
def test_many_short_requests_measure_as_one_long_one_does() -> None:
    engine = make("qwen3")
    engine.core.meter.value, engine.measures_drafting = BreakEven(), True
    engine.core.acceptance = NO_HISTORY
    set_script(engine, [0] * 160)
    for _ in range(TRIAL + 2):
        engine.generate(PROMPT, max_tokens=6)
    assert engine.core.meter.value.at(0) == 3.0
    engine.measures_drafting = False


def test_loaded_engines_measure_what_nobody_measured() -> None:
    plan = dj.Plan(max_length=64)
    engine = dj.load("tiny", plan=plan)
    assert engine.measures_drafting
    engine.core.meter.use(BreakEven.constant(2.0))  # measured by other means)
    assert not engine.measures_drafting
