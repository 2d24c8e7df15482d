"""Run recorded turns again, and compare the work that they schedule and the tokens they decide."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.turns.recording import VERSION, about
from dflash_jax.engine.turns.turn_events import TurnEvents
from dflash_jax.engine.turns.turn_lines import NoCallGrammars, events_of
from dflash_jax.engine.turns.turn_recorder import END, Line, TurnRecorder
from dflash_jax.errors import DFlashError, RequestError
from dflash_jax.plan import Plan

FIELDS = frozenset(TurnEvents._fields) | {"work", "tokens"}


@dataclasses.dataclass
class ReplayedTurns:
    """Counts of the turns that were run again, and the first difference.

    Attributes:
      difference: the first one, in words; "" if there is none.
      end: why the recording ends; "" if it does not say so.
    """

    turns: int = 0
    requests: int = 0
    tokens: int = 0
    difference: str = ""
    end: str = ""


class TurnRecording:
    """A file of recorded turns, see `record_turns`.

    Attributes:
      about: what the turns depend on besides their events.

    Raises:
      RequestError: the file cannot be read, or does not begin as a recording of this version does.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open(encoding="utf-8") as file:
                first = json.loads(file.readline())
            version = first.pop("recording")
            plan = first["plan"]
            known = isinstance(plan, dict) and isinstance(first["model"], dict)
            known = known and isinstance(first["versions"], dict)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RequestError(f"{path} does not begin as a recording does: {error!r}") from error
        if version != VERSION or not known:
            raise RequestError(
                f"{path} is a recording of version {version!r}; expected {VERSION}: replay it with"
                " the version of dflash-jax that wrote it"
            )
        self.about: Line = first

    @property
    def plan(self) -> Plan:
        """The recorded plan; turns that depend on a prefix folder are not recorded.

        Raises:
          PlanError: it is no plan.
        """
        plan = Plan.parse(self.about["plan"], where=f"{self.path} has no plan")
        return dataclasses.replace(plan, prefix_folder="")

    def check(self, engine: Engine) -> None:
        """Check that an engine is as the recorded one was.

        Raises:
          RequestError: it is not; the message names the first difference.
        """
        for name, expected in self.about.items():
            value = about(engine).get(name)
            if value == expected:
                continue
            if isinstance(value, dict) and isinstance(expected, dict):
                keys = [*expected, *value]
                key = next(key for key in keys if value.get(key) != expected.get(key))
                name = f"{name} {key}"
                value = value.get(key)
                expected = expected.get(key)
            raise RequestError(
                f"{self.path} was recorded with another {name}: {expected!r}, but here it is"
                f" {value!r}; replay it with what it was recorded with"
            )

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the turns with the numbers of their lines; a last one that was cut is left out.

        Raises:
          RequestError: a line is no turn.
        """
        try:
            with self.path.open(encoding="utf-8") as file:
                file.readline()
                for number, text in enumerate(file, start=2):
                    if text.endswith("\n"):
                        yield number, self._turn(number, text)
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{self.path} cannot be read: {error}") from error

    def _turn(self, number: int, text: str) -> Line:
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not (FIELDS | {END}).issuperset(line):
                raise ValueError(f"expected an object with some of {', '.join(sorted(FIELDS))}")
        except (ValueError, RecursionError) as error:
            raise self.wrong(number, error) from error
        return line

    def wrong(self, number: int, error: Exception) -> RequestError:
        """Return the error of a line that is no turn."""
        return RequestError(f"{self.path}, line {number}, is no turn: {error}")


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does; False if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "recording" in first


def replay(engine: Engine, recording: TurnRecording) -> ReplayedTurns:
    """Run recorded turns on a new engine with the same models and plan, up to a difference.

    Raises:
      RequestError: the engine is another one, or a line of the recording is no turn.
    """
    recording.check(engine)
    core = engine.core
    core.call_grammars = NoCallGrammars(engine)
    core.meter.enabled = False
    made: list[Line] = []
    core.recorder = TurnRecorder(made.append)
    replayed = ReplayedTurns()
    for number, line in recording.lines():
        if END in line:
            replayed.end = str(line[END])
            break
        try:
            events = events_of(engine, line)
        except (DFlashError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise recording.wrong(number, error) from error
        if "work" not in line:
            core.settle(events)
            made.clear()
            continue
        core.step(events)
        replayed.turns += 1
        replayed.requests += len(events.admit)
        replayed.difference = _difference(number, line, made)
        if replayed.difference:
            break
        replayed.tokens += sum(len(tokens) for _, *tokens in line["tokens"])
        made.clear()
    return replayed


def _difference(number: int, line: Line, made: list[Line]) -> str:
    """Return how a turn that was run again differs from that in a line; "" if it does not."""
    if END in made[-1]:
        return f"line {number}: {made[-1][END]}"
    for name, what in (("work", "scheduled work"), ("tokens", "decided tokens")):
        if made[0][name] != line.get(name):
            again = json.dumps(made[0][name])
            recorded = json.dumps(line.get(name))
            return f"line {number}: the {what} is {again}; {recorded} was recorded"
    return ""
