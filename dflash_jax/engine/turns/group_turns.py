"""Engines of a group of processes in lock step: process 0 publishes its turns, the others follow.

The message of a turn has its events and the work that process 0 scheduled. It is sent before that
work is dispatched. A follower applies the events, schedules by itself, and compares its work with
that of process 0 before it dispatches any: one that differs ends the group with an error, where it
would make the others wait for ever. Sums of the decided tokens are compared with the work.

Programs are in use once all processes have compiled them, so that no turn waits for a compiler.
"""

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dflash_jax.distributed import Group
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.scheduler import SchedulerOutput
from dflash_jax.engine.turns.turn_events import TurnEvents
from dflash_jax.engine.turns.turn_lines import NoCallGrammars, events_of
from dflash_jax.engine.turns.turn_recorder import END, Line, TurnRecorder, described_work
from dflash_jax.errors import ComputeError, HostError
from dflash_jax.graph.build import WORKERS, Ended, Executable, compile_programs
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.programs import Program

COMPILE = "compile"  # in a message: number of a compilation, its programs, and how many at a time


class TokenSum:
    """A sum of all tokens that a process's turns decided."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int, tokens: Sequence[int]) -> None:
        """Add tokens of a request."""
        self.value = zlib.crc32(repr((number, *tokens)).encode(), self.value)


class TurnPublisher(TurnRecorder):
    """Publishes each turn of process 0, in place of recording it."""

    followed = True

    def __init__(self, group: Group):
        super().__init__(self._send)
        self._group = group
        self._sum = TokenSum()
        self._lock = threading.Lock()
        self._turns = itertools.count()
        self._compilations = itertools.count()

    def scheduled(self, work: SchedulerOutput | None) -> None:
        """Publish the turn, before its work is dispatched."""
        line = self._line or {}
        self._line = None
        self._send(line | {"work": described_work(work), "sum": self._sum.value})

    def decided(self, number: int, tokens: Sequence[int]) -> None:
        """Count tokens that the device decided for a request."""
        self._sum.add(number, tokens)

    def begin_compilation(self, keys: Sequence[str], workers: int) -> int:
        """Have all others compile programs, and return the number of the compilation."""
        number = next(self._compilations)
        self._send({COMPILE: [number, keys, workers]})
        return number

    def _salt(self, salt: str) -> str:
        return salt

    def _send(self, line: Line) -> None:
        data = json.dumps(line, separators=(",", ":")).encode()
        with self._lock:
            self._group.publish(next(self._turns), data)


def publish_turns(engine: Engine, group: Group) -> None:
    """Have the other processes of a group follow all turns of a new engine of process 0."""
    publisher = TurnPublisher(group)
    engine.core.recorder = publisher

    def build(
        programs: Iterable[Program],
        *,
        workers: int = WORKERS,
        begun: Callable[[Program], object] = lambda program: None,
        ended: Ended = lambda key, cached, seconds: None,
    ) -> dict[ProgramKey, Executable]:
        """Compile programs in all processes.

        Raises:
          ComputeError: another process could not.
        """
        programs = list(programs)
        keys = [str(program.key) for program in programs]
        number = publisher.begin_compilation(keys, workers)
        made = compile_programs(programs, workers=workers, begun=begun, ended=ended)
        for host in range(1, group.size):
            if error := group.wait_for(f"compiled/{number}/{host}"):
                raise ComputeError(f"host {host}: {error.decode()}")
        group.delete(f"compiled/{number}")
        return made

    engine.core.runner.compiled.build = build


class FollowedTurns(TurnRecorder):
    """Compares the turns of a follower with those of process 0, before work is dispatched."""

    def __init__(self, host: int):
        super().__init__(lambda line: None)
        self._host = host
        self._sum = TokenSum()
        self._expected: Line = {}

    def expect(self, line: Line) -> None:
        """Compare the next turn with that of process 0."""
        self._expected = line

    def begin(self, events: TurnEvents) -> None:
        """Do nothing: the events came from process 0."""

    def scheduled(self, work: SchedulerOutput | None) -> None:
        """Compare work that is to be dispatched, and the tokens that were decided before it.

        Raises:
          HostError: they are not those of process 0.
        """
        own: Line = {"work": described_work(work), "sum": self._sum.value}
        for name, value in own.items():
            expected = self._expected[name]
            if value != expected:
                what = "work" if name == "work" else "sum of tokens"
                raise HostError(
                    f"the {what} of host {self._host} is {json.dumps(value)}, that of host 0 is"
                    f" {json.dumps(expected)}; give all hosts the same devices, versions and files"
                )

    def decided(self, number: int, tokens: Sequence[int]) -> None:
        """Count tokens that the device decided for a request."""
        self._sum.add(number, tokens)


def follow_turns(engine: Engine, group: Group) -> str:
    """Run the turns that process 0 publishes on a new engine; return why they end.

    Raises:
      HostError: this process would do other work than process 0, or the group has ended.
      DFlashError: a request of process 0 cannot be served here, or a turn failed.
    """
    core = engine.core
    core.grammars.trusted = True  # process 0 has tried them
    core.call_grammars = NoCallGrammars(engine)
    followed = FollowedTurns(group.index)
    core.recorder = followed
    compiler = ThreadPoolExecutor(1, "compiler")
    for turn in itertools.count():
        line: dict[str, Any] = json.loads(group.follow(turn))
        if END in line:
            return str(line[END])
        if COMPILE in line:
            compiler.submit(_compile, engine, group, *line[COMPILE])
            continue
        events = events_of(engine, line)
        if "work" in line:
            followed.expect(line)
            core.step(events)
        else:
            core.settle(events)
    raise AssertionError("unreachable")


def _compile(engine: Engine, group: Group, number: int, names: Sequence[str], workers: int) -> None:
    """Compile programs, and tell process 0 when that is done, or why it cannot be."""
    error = ""
    try:
        engine.core.runner.compiled.compile_keys(map(ProgramKey.parse, names), workers=workers)
    except Exception as failure:  # of one program, such as one without memory
        error = " ".join(f"{type(failure).__name__}: {failure}".split())[:1000]
    group.put(f"compiled/{number}/{group.index}", error.encode())
