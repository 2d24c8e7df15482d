"""Several decode steps per call: their number, and that outputs do not depend on it."""

import collections
import time
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.bench.profile import profile
from dflash_jax.engine import break_even
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.scheduler import BURST, SchedulerOutput, StepPacer
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.state import OutputColumn
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.networks import build_graph
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def multi_step() -> Engine:
    """Three rows; a call may make eight steps."""
    target = tiny_target(num_layers=2, vocab_size=251)
    plan = Plan(rows=3, max_length=128, chunk=16, block=4, steps_per_call=8)
    return random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)


class Fixed(StepPacer):
    """A fixed number of steps per call, whatever their time."""

    def __init__(self, num_steps: int):
        super().__init__(num_steps)
        self.num_steps = num_steps

    def record(self, num_steps: int, dispatched: float) -> None:
        """Do nothing."""


def test_the_pacer_chooses_the_steps_that_fit_into_a_burst() -> None:
    pacer = StepPacer(max_steps=8)
    assert pacer.num_steps == 1  # until a step was timed
    pacer.record(1, time.perf_counter() - 0.4 * BURST)
    assert pacer.num_steps == 2
    pacer.record(4, time.perf_counter() - BURST)  # too long: it waited for the call before
    assert pacer.num_steps == 8
    pacer = StepPacer(max_steps=8)
    pacer.record(1, time.perf_counter() - 3 * BURST)
    assert pacer.num_steps == 1
    pacer.record(0, time.perf_counter())  # no row could continue: nothing was measured
    assert pacer.num_steps == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"temperature": 0.9, "seed": 5}, marks=pytest.mark.soak)]
)
def test_outputs_do_not_depend_on_the_steps_per_call(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    stop = multi_step.generate([3, 1, 4], max_tokens=30, **options).token_ids[17]
    requests = [
        {"prompt": [3, 1, 4], "max_tokens": 30, "stop_token_ids": [stop], **options},
        {"prompt": [1, 5, 9, 2, 6], "max_tokens": 23, **options},
        {"prompt": [5, 3, 5], "max_tokens": 40, "speculative": False, **options},
        {"prompt": [8, 9], "max_tokens": 5, **options},
    ]
    outcomes, turns = [], []
    for num_steps in (1, 3, 8):
        monkeypatch.setattr(multi_step.core, "pacer", Fixed(num_steps))
        handles = [multi_step.submit(**request) for request in requests]
        turns.append(0)
        while not all(handle.done for handle in handles):
            multi_step.advance()
            turns[-1] += 1
        outcomes.append([handle.result() for handle in handles])
        assert not multi_step.core.active
    tokens = [[result.token_ids for result in results] for results in outcomes]
    assert tokens[0] == tokens[1] == tokens[2]
    reasons = [[result.finish_reason for result in results] for results in outcomes]
    assert reasons[0] == reasons[1] == reasons[2]
    lengths = [[result.stats.acceptance_lengths for result in results] for results in outcomes]
    assert lengths[0] == lengths[1] == lengths[2]
    assert turns[0] > turns[1] >= turns[2]


def test_plain_calls_extend_the_drafters_context_as_single_steps_do(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = []
    for num_steps in (1, 3, 8):
        monkeypatch.setattr(multi_step.core, "pacer", Fixed(num_steps))
        handle = multi_step.submit([3, 1, 4, 1, 5], max_tokens=40, speculative=False)
        while not handle.done:
            multi_step.advance()
        length = int(multi_step.core.runner.state.position[0])
        assert length == 5 + 39
        caches = map(np.asarray, jax.tree.leaves(multi_step.core.runner.state.drafter))
        window = np.arange(length - 12, length)  # of the first layer, whose cache is a ring
        contexts.append([x[0][:, window % x.shape[2]] for x in caches])
    assert np.abs(contexts[0][0]).max() > 0
    for other in contexts[1:]:
        for ours, theirs in zip(other, contexts[0], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_plain_step_of_a_call_leaves_the_drafters_weights_alone(multi_step: Engine) -> None:
    """The loop over steps multiplies as often as that of an engine without a drafter."""
    alone = Engine(build_graph(multi_step.graph.config, None, multi_step.plan), multi_step.params)

    def products(engine: Engine) -> tuple[int, int]:
        program = engine.core.runner.compiled.programs[engine.graph.key(Step.PLAIN)]
        traced = jax.make_jaxpr(program.function)(*program.arguments).jaxpr
        [loop] = [x for x in traced.eqns if x.primitive.name == "while"]
        inside, whole = (
            sum(str(x).count(name) for name in ("dot_general[", "ffi_call["))
            for x in (loop.params["body_jaxpr"], traced)
        )
        return inside, whole - inside

    assert products(multi_step)[0] == products(alone)[0] > 0
    assert products(multi_step)[1] > products(alone)[1] == 0


def test_calls_make_single_steps_while_requests_are_queued(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    step = multi_step.core.runner.step

    def noted(name: str, work: SchedulerOutput, *rest: object, **options: object) -> object:
        if name == "speculative":
            asked.append(work.num_steps)
        return step(name, work, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(multi_step.core, "pacer", Fixed(8))
    monkeypatch.setattr(multi_step.core.runner, "step", noted)
    *first, last = (multi_step.submit([1, i], max_tokens=12 + 8 * (i == 3)) for i in range(4))
    while last.sequence.row is None:
        multi_step.advance()
    assert set(asked) == {1}
    asked.clear()
    while not all(handle.done for handle in (*first, last)):
        multi_step.advance()
    assert asked[-1] == 8


def test_no_call_is_dispatched_after_a_multi_step_call_or_one_that_may_end_every_row(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step is in flight ahead, unless the in-flight steps may complete every output."""
    ahead: list[int] = []
    step = multi_step.core.runner.step

    def noted(name: str, *rest: object, **options: object) -> object:
        if name == "speculative":
            ahead.append(len(multi_step.core.in_flight))
        return step(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(multi_step.core.runner, "step", noted)
    for num_steps, most in ((1, 1), (3, 0)):
        monkeypatch.setattr(multi_step.core, "pacer", Fixed(num_steps))
        ahead.clear()
        multi_step.generate([2, 7, 1], max_tokens=60)
        assert ahead[0] == 1  # the prefill, which decides one token
        assert len(ahead) > 3
        assert max(ahead[1:]) == most
    monkeypatch.setattr(multi_step.core, "pacer", Fixed(1))
    ahead.clear()
    multi_step.generate([2, 7, 1], max_tokens=5)  # a block of 4, after the token of the prefill
    assert ahead[1:] == [0] * (len(ahead) - 1)


def test_a_call_without_active_rows_makes_at_most_one_step(multi_step: Engine) -> None:
    handle = multi_step.submit([7, 8, 9], max_tokens=6)
    while not handle.done:
        multi_step.advance()
    idle, run = (
        multi_step.core.scheduler.rules(),
        multi_step.core.runner.executables[multi_step.graph.key(Step.SPECULATIVE)],
    )
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(multi_step.core.runner.state)]
    inputs = DecodeInputs(idle, num_steps=np.int32(8))
    multi_step.core.runner.state, _, out = run(
        multi_step.params, multi_step.core.runner.state, None, inputs
    )
    assert (np.asarray(out.packed) == -1).all()
    after = map(np.asarray, jax.tree.leaves(multi_step.core.runner.state))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    for count in (1, 3):  # exactly, to be timed
        inputs, state = DecodeInputs(idle, num_steps=np.int32(-count)), multi_step.core.runner.state
        multi_step.core.runner.state, _, out = run(multi_step.params, state, None, inputs)
        answers = np.asarray(out.packed)
        assert (answers[:count, 0, OutputColumn.NUM_TOKENS] == 0).all()
        assert (answers[count:] == -1).all()


def test_break_even_is_that_of_calls_of_as_many_steps_as_requests_make(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    multi_step.warm_up()
    counts, run = collections.defaultdict(list), multi_step.core.runner.run

    def counted(key: ProgramKey, inputs: Any) -> Any:
        counts[key.step].append(-int(getattr(inputs, "num_steps", -1)))
        return run(key, inputs)

    monkeypatch.setattr(multi_step.core.runner, "run", counted)
    monkeypatch.setattr(break_even, "POSITIONS", (0, 32, 4096))
    found, most = break_even.measure(multi_step.core.runner, samples=2, seconds=2), 8
    assert found.positions == (0, 32)  # 4,096 tokens do not fit into a row
    assert (found.rows, found.blocks[-1]) == ((1, 3), 4)
    for of_rows in found.lengths:
        for block in range(len(found.blocks)):
            assert 0 < of_rows[0][block] <= of_rows[1][block]
        assert [*of_rows[1]] == sorted(of_rows[1])
    assert set(counts.pop(Step.PREFILL)) == {1}  # of 16 tokens
    for first, second, *timed in counts.values():
        assert (first, second) == (1, 1)
        assert most in timed  # after a warm-up of each number of rows and of drafts
        assert len(timed) > 2
    assert not np.asarray(multi_step.core.runner.state.position).any()
    monkeypatch.setattr(multi_step.core.runner.executor, "hosts", 2)
    counts.clear()
    assert break_even.measure(multi_step.core.runner) == break_even.BreakEven()
    assert not counts  # the clocks of processes differ


@pytest.mark.parametrize("speculative", [True, False])
def test_decoding_transfers_nothing_to_the_device(multi_step: Engine, speculative: bool) -> None:
    handle = multi_step.submit([3, 1, 4], max_tokens=30, speculative=speculative)
    while not handle.token_ids:
        multi_step.advance()
    multi_step.advance()
    with jax.transfer_guard_host_to_device("disallow"):
        while len(handle.token_ids) < 25 and not handle.done:
            multi_step.advance()
    assert not handle.sequence.failures
    handle.close()


def test_a_first_token_is_emitted_before_waiting_for_a_multi_step_call(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_step.core, "pacer", Fixed(8))
    handle, lengths = multi_step.submit([3, 1, 4], max_tokens=30), []
    while not handle.done:
        multi_step.advance()
        lengths.append(len(handle.token_ids))
    first = next(n for n in lengths if n)
    assert first == 1
    assert lengths.count(1) == 1  # nothing was dispatched after the call that was waited for


@pytest.mark.exhaustive
def test_a_profile_of_a_multi_step_engine_takes_single_steps(
    multi_step: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_step.core, "pacer", Fixed(8))
    report = profile(multi_step, [1, 2, 3], steps=2, speculative=False)
    assert {kernel.calls for kernel in report.kernels if kernel.part != "rest"} == {1}
