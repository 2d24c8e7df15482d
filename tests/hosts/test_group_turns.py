"""Two engines in one process, of which one follows the turns of the other by messages."""

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import pytest

import dflash_jax as dj
from dflash_jax.distributed import Group
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.scheduler import Scheduler, SchedulerOutput
from dflash_jax.engine.turns import group_turns
from dflash_jax.engine.turns.group_turns import follow_turns, publish_turns
from dflash_jax.errors import ComputeError, HostError, RequestError
from dflash_jax.graph import Graph
from dflash_jax.graph.build import Executable
from dflash_jax.graph.keys import ProgramKey, Step
from tests.hosts.following import every_event

LONG = [5, 6, 7] * 25
ENDLESS: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
SET = ProgramKey(Step.SET_LOGITS_STATE)


class MemoryGroup(Group):
    """A group whose processes are threads: values are in a dictionary."""

    def __init__(self, index: int, values: dict[str, bytes], changed: threading.Condition):
        super().__init__(index)
        self.size = 2
        self._values = values
        self._changed = changed

    def put(self, key: str, data: bytes) -> None:
        with self._changed:
            self._values[key] = data
            self._changed.notify_all()

    def wait_for(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 60)
            return self._values[key]

    def delete(self, key: str) -> None:
        with self._changed:
            for each in [x for x in self._values if x == key or x.startswith(f"{key}/")]:
                del self._values[each]

    def publish(self, turn: int, data: bytes) -> None:
        self.put(f"turn/{turn}", data)

    def follow(self, turn: int) -> bytes:
        return self.wait_for(f"turn/{turn}")


class Pair:
    """Engines of two hosts, with the programs of a third one; the second follows the first.

    Attributes:
      end: why the second one stopped to follow.
    """

    def __init__(self, engine: Engine, params: Any = None):
        values: dict[str, bytes] = {}
        changed = threading.Condition()
        self._groups = [MemoryGroup(i, values, changed) for i in range(2)]
        self.first = self._engine(engine, engine.params)
        self.second = self._engine(engine, engine.params if params is None else params)
        self._pool = ThreadPoolExecutor(1)
        self.end: Future[str] = Future()
        self._recorders: list[Any] = []

    @staticmethod
    def _engine(engine: Engine, params: Any) -> Engine:
        made = Engine(Graph(engine.graph.pair, engine.plan), params, tokenizer=engine.tokenizer)
        made.core.runner.compiled.executables |= engine.core.runner.executables
        return made

    def start(self) -> None:
        publish_turns(self.first, self._groups[0])
        self._recorders.append(self.first.core.recorder)
        self.end = self._pool.submit(self._follow)

    def _follow(self) -> str:
        try:
            return follow_turns(self.second, self._groups[1])
        finally:
            self._recorders.append(self.second.core.recorder)

    def close(self) -> str:
        """Close the first engine; return why the second one ended."""
        self.first.close()
        return self.end.result(60)

    @property
    def sums(self) -> list[int]:
        """Sums of the tokens that each has decided, once it ended."""
        return [recorder._sum.value for recorder in self._recorders]


@pytest.fixture
def pair(tiny3: Engine) -> Iterator[Pair]:
    tiny3.warm_up("greedy", "sampled", "penalized")
    made = Pair(tiny3)
    made.start()
    yield made
    made.first.close()
    made.end.exception(60)


def test_a_follower_decides_the_same_tokens_whatever_happens(pair: Pair, tiny3: Engine) -> None:
    """Cancelled, closed, dropped, overdue, sampled and penalized requests."""
    engine = pair.first

    def given_up() -> None:
        cell = dj.CancelCell()
        handle = engine.submit([8, 8], cancel=cell, **ENDLESS)
        next(iter(handle))
        cell.cancel("disconnect")
        closed = engine.submit(LONG, **ENDLESS)
        next(iter(closed))
        closed.close()
        dropped = engine.submit([1, 3], **ENDLESS)
        next(iter(dropped))
        del dropped
        late = dj.Recovery(deadline_s=0.001)
        assert engine.generate([4], recovery=late, **ENDLESS).finish_reason == "length"

    thread = threading.Thread(target=given_up)
    thread.start()
    greedy = engine.generate_many([[1, 2, 3], LONG, [9]], max_tokens=30)
    drawn = engine.generate([7], temperature=0.9, max_tokens=20, seed=3)
    scored = engine.generate([3, 4], logprobs=2, frequency_penalty=0.5, max_tokens=8)
    thread.join(60)
    assert pair.close() == "the engine was closed"
    first, second = pair.sums
    assert first == second != 0
    assert not pair.second.core.requests
    alone = tiny3.generate_many([[1, 2, 3], LONG, [9]], max_tokens=30)
    assert [x.token_ids for x in greedy] == [x.token_ids for x in alone]
    assert drawn.token_ids == tiny3.generate([7], temperature=0.9, max_tokens=20, seed=3).token_ids
    options: dict[str, Any] = {"logprobs": 2, "frequency_penalty": 0.5, "max_tokens": 8}
    assert scored.token_ids == tiny3.generate([3, 4], **options).token_ids


@pytest.mark.exhaustive
def test_structured_and_recovered_requests_are_followed_and_late_programs_compiled() -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    plan = dj.Plan(rows=2, max_length=1024, prefix_cache=2**22, dtype="float32", kernels="xla")
    engine = dj.load("tiny", plan=plan)
    engine.warm_up("greedy", "sampled", "penalized", "constrained", "recovery")
    made = Pair(engine)
    made.start()
    answers = every_event(made.first)
    assert made.close() == "the engine was closed"
    first, second = made.sums
    assert first == second != 0
    assert answers == every_event(engine)


def test_other_work_is_named_before_it_is_dispatched(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Scheduler.schedule
    execute = ModelRunner.execute
    dispatched: list[SchedulerOutput] = []

    def other(self: Scheduler, *arguments: Any) -> SchedulerOutput | None:
        work = schedule(self, *arguments)
        if self is pair.second.core.scheduler and work is not None and not work.prefill:
            return dataclasses.replace(work, num_steps=7)
        return work

    def noted(self: ModelRunner, work: SchedulerOutput) -> Any:
        if self is pair.second.core.runner:
            dispatched.append(work)
        return execute(self, work)

    monkeypatch.setattr(Scheduler, "schedule", other)
    monkeypatch.setattr(ModelRunner, "execute", noted)
    pair.first.generate([1, 2], max_tokens=8)
    with pytest.raises(HostError, match=r'work of host 1 is \{.*"steps": 7.*give all hosts the'):
        pair.end.result(60)
    assert all(work.prefill for work in dispatched)


def test_other_tokens_are_named_with_the_next_work(tiny3: Engine) -> None:
    tiny3.warm_up()
    made = Pair(tiny3, jax.tree.map(lambda x: x[::-1], tiny3.params))
    made.start()
    made.first.generate([1, 2], max_tokens=30)
    with pytest.raises(HostError, match="the sum of tokens of host 1 is"):
        made.end.result(60)


def test_a_program_is_used_once_all_have_compiled_it(
    pair: Pair, tiny3: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tiny3.core.runner.executables
    wait = threading.Event()

    def read(programs: Any, **_: Any) -> dict[ProgramKey, Executable]:
        return {program.key: known[program.key] for program in programs}

    def read_late(programs: Any, **_: Any) -> dict[ProgramKey, Executable]:
        assert wait.wait(60)
        return read(programs)

    monkeypatch.setattr(group_turns, "compile_programs", read)
    pair.second.core.runner.compiled.build = read_late
    for engine in (pair.first, pair.second):
        del engine.core.runner.executables[SET]
    compiling = threading.Thread(target=pair.first.warm_up, args=("penalized",))
    compiling.start()
    pair.first.generate([1, 2], max_tokens=20)  # meanwhile
    assert compiling.is_alive()
    assert SET not in pair.first.core.runner.in_use
    wait.set()
    compiling.join(60)
    pair.first.generate([1, 2], max_tokens=3, logprobs=1)
    assert SET in pair.first.core.runner.in_use
    assert pair.close() == "the engine was closed"
    assert SET in pair.second.core.runner.in_use


def test_what_a_follower_cannot_compile_is_told_by_its_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(programs: Any, **_: Any) -> dict[ProgramKey, Executable]:
        raise RuntimeError("no memory")

    known = dict(pair.first.core.runner.executables)

    def read(programs: Any, **_: Any) -> dict[ProgramKey, Executable]:
        return {program.key: known[program.key] for program in programs}

    monkeypatch.setattr(group_turns, "compile_programs", read)
    pair.second.core.runner.compiled.build = fail
    for engine in (pair.first, pair.second):
        del engine.core.runner.executables[SET]
    with pytest.raises(ComputeError, match="host 1: RuntimeError: no memory"):
        pair.first.warm_up("penalized")
    assert pair.first.generate([1, 2], max_tokens=3).token_ids


def test_hosts_keep_their_parameters_and_make_no_new_state(pair: Pair) -> None:
    with pytest.raises(RequestError, match="of a model over several hosts cannot be replaced"):
        pair.first.update_params(pair.first.params)
    pair.first.core.runner.executor.hosts = 2
    with pytest.raises(HostError, match="of all hosts was interrupted; start all hosts again"):
        pair.first.core._rebuild()
