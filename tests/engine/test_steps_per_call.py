"""Several decode steps in one call: how many, and that nobody can tell from the output."""

import time

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.bench.profile import profile
from dflash_jax.compiler.keys import ProgramKey, Step, Variant
from dflash_jax.decode.inputs import DecodeInputs
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.scheduler import BURST, SchedulerOutput, StepPacer
from dflash_jax.state import OutputColumn
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

SPECULATIVE = ProgramKey(Step.SPECULATIVE, Variant.GREEDY)


@pytest.fixture(scope="module")
def several() -> Engine:
    """Three rows; a call may make eight steps."""
    target = tiny_target(num_layers=2, vocab_size=251)
    plan = Plan(rows=3, max_length=128, chunk=16, block=4, steps_per_call=8)
    return random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)


class Fixed(StepPacer):
    """So many steps in every call, however long they take."""

    def __init__(self, num_steps: int):
        super().__init__(num_steps)
        self.num_steps = num_steps

    def record(self, num_steps: int, dispatched: float) -> None:
        """Changes nothing."""


def test_a_call_makes_as_many_steps_as_a_burst_has_time_for() -> None:
    pace = StepPacer(max_steps=8)
    assert pace.num_steps == 1  # until a step was timed
    pace.record(1, time.perf_counter() - 0.4 * BURST)
    assert pace.num_steps == 2
    pace.record(4, time.perf_counter() - BURST)  # it waited for the last call: its time is unknown
    assert pace.num_steps == 8
    pace = StepPacer(max_steps=8)
    pace.record(1, time.perf_counter() - 3 * BURST)
    assert pace.num_steps == 1
    pace.record(0, time.perf_counter())  # no row could go on: that says nothing
    assert pace.num_steps == 1


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"temperature": 0.9, "seed": 5}, marks=pytest.mark.soak)]
)
def test_rows_say_the_same_however_many_steps_a_call_makes(
    several: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    stop = several.generate([3, 1, 4], max_tokens=30, **options).token_ids[17]
    requests = [
        {"prompt": [3, 1, 4], "max_tokens": 30, "stop_token_ids": [stop], **options},
        {"prompt": [1, 5, 9, 2, 6], "max_tokens": 23, **options},
        {"prompt": [5, 3, 5], "max_tokens": 40, "speculative": False, **options},
        {"prompt": [8, 9], "max_tokens": 5, **options},
    ]
    said, turns = [], []
    for rounds in (1, 3, 8):
        monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(rounds))
        lives = [several.submit(**request) for request in requests]
        turns.append(0)
        while not all(live.done for live in lives):
            several.advance()
            turns[-1] += 1
        said.append([live.result() for live in lives])
        assert not several.active
    tokens = [[result.token_ids for result in results] for results in said]
    assert tokens[0] == tokens[1] == tokens[2]
    reasons = [[result.finish_reason for result in results] for results in said]
    assert reasons[0] == reasons[1] == reasons[2]
    rounds = [[result.stats.acceptance_lengths for result in results] for results in said]
    assert rounds[0] == rounds[1] == rounds[2]
    assert turns[0] > turns[1] >= turns[2]


def test_nobody_who_waits_for_a_row_waits_for_several_steps(
    several: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    step = several.runner.step

    def noted(name: str, work: SchedulerOutput, *rest: object, **options: object) -> object:
        if name == "speculative":
            asked.append(work.num_steps)
        return step(name, work, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(8))
    monkeypatch.setattr(several.runner, "step", noted)
    *first, last = (several.submit([1, i], max_tokens=12 + 8 * (i == 3)) for i in range(4))
    while last.sequence in several.core.scheduler.waiting:
        several.advance()
    assert set(asked) == {1}
    asked.clear()
    while not all(live.done for live in (*first, last)):
        several.advance()
    assert asked[-1] == 8


def test_no_call_is_made_behind_one_of_several_steps_or_one_that_may_end_every_row(
    several: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a single step one is made, until unread ones may have said all that was asked for."""
    ahead: list[int] = []
    step = several.runner.step

    def noted(name: str, *rest: object, **options: object) -> object:
        if name == "speculative":
            ahead.append(len(several.core.in_flight))
        return step(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(several.runner, "step", noted)
    for rounds, most in ((1, 1), (3, 0)):
        monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(rounds))
        ahead.clear()
        several.generate([2, 7, 1], max_tokens=60)
        assert ahead[0] == 1  # the prompt, which says one token
        assert len(ahead) > 3
        assert max(ahead[1:]) == most
    monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(1))
    ahead.clear()
    several.generate([2, 7, 1], max_tokens=5)  # a block of 4, behind the prompt's token
    assert ahead[1:] == [0] * (len(ahead) - 1)


def test_a_call_makes_no_step_that_no_row_can_use(several: Engine) -> None:
    live = several.submit([7, 8, 9], max_tokens=6)
    while not live.done:
        several.advance()
    idle, run = several.core.scheduler.rules(), several.executables[SPECULATIVE]
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(several.runner.state)]
    inputs = DecodeInputs(idle, num_steps=np.int32(8))
    several.runner.state, _, out = run(several.params, several.runner.state, None, inputs)
    assert (np.asarray(out.packed) == -1).all()
    after = map(np.asarray, jax.tree.leaves(several.runner.state))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    inputs = DecodeInputs(idle, num_steps=np.int32(0))
    several.runner.state, _, out = run(several.params, several.runner.state, None, inputs)
    answers = np.asarray(out.packed)
    assert (answers[1:] == -1).all()
    assert answers[0, 0, OutputColumn.NUM_TOKENS] == 0  # one step, to be timed


@pytest.mark.parametrize("speculative", [True, False])
def test_decoding_sends_nothing_to_the_device(several: Engine, speculative: bool) -> None:
    live = several.submit([3, 1, 4], max_tokens=30, speculative=speculative)
    while not live.token_ids:
        several.advance()
    several.advance()
    with jax.transfer_guard_host_to_device("disallow"):
        while len(live.token_ids) < 25 and not live.done:
            several.advance()
    assert not live.sequence.failures
    several.cancel(live)


def test_a_first_token_is_given_before_a_call_of_several_steps_is_waited_for(
    several: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(8))
    live, given = several.submit([3, 1, 4], max_tokens=30), []
    while not live.done:
        several.advance()
        given.append(len(live.token_ids))
    first = next(n for n in given if n)
    assert first == 1
    assert given.count(1) == 1  # nothing was dispatched behind the call that was waited for


def test_a_profile_takes_single_steps_of_an_engine_that_makes_several(
    several: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several.core.scheduler, "pacer", Fixed(8))
    found = profile(several, [1, 2, 3], steps=2, speculative=False)
    assert {kernel.calls for kernel in found.kernels if kernel.part != "rest"} == {1}
