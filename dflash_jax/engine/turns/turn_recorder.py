"""Turns as JSON: what entered each, which work it scheduled, and which tokens it decided."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.scheduler import SchedulerOutput
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.turns.turn_events import TurnEvents

Line = dict[str, Any]
END = "end_of_recording"  # with the reason, in the last line


class TurnRecorder:
    """Describes each turn of an engine, and passes it on as it ends.

    Attributes:
      followed: whether other processes do the same work, by what is passed on.

    Args:
      write: takes the description of a turn: its events, and `work` and `tokens` unless it only
        applied events.
    """

    followed = False

    def __init__(self, write: Callable[[Line], object]):
        self._write: Callable[[Line], object] | None = write
        self._salts: dict[str, str] = {}  # names of salts, which may tell API keys
        self._line: Line | None = None  # of the current turn

    def begin(self, events: TurnEvents) -> None:
        """Note what a turn was given."""
        self._line = self._events(events)

    def scheduled(self, work: SchedulerOutput | None) -> None:
        """Note the work of the turn."""
        if self._line is not None:
            self._line |= {"work": described_work(work), "tokens": []}

    def decided(self, number: int, tokens: Sequence[int]) -> None:
        """Note tokens that the device decided for a request."""
        if self._line is not None:
            self._line["tokens"].append([number, *tokens])

    def end(self) -> None:
        """Pass the turn on, unless it only looked for events and there were none."""
        line = self._line
        self._line = None
        if line and self._write is not None:
            self._write(line)

    def stop(self, reason: str) -> None:
        """Pass on why the turns from here on are not known, and ignore them."""
        if self._write is not None:
            self._write({END: reason})
        self._write = None

    def _events(self, events: TurnEvents) -> Line:
        line: Line = {}
        if events.admit:
            line["admit"] = [self._admission(sequence) for sequence in events.admit]
        if events.end:
            line["end"] = [list(end) for end in events.end]
        if events.retry:
            line["retry"] = [[x.number, x.structure, x.error] for x in events.retry]
        if events.use:
            line["use"] = [str(key) for key in events.use]
        if events.steps != 1:
            line["steps"] = events.steps
        if events.break_even is not None:
            line["break_even"] = list(events.break_even)
        return line

    def _admission(self, sequence: RunningRequest) -> Line:
        request = sequence.request
        return {
            "number": sequence.number,
            "group": sequence.group,
            "seed": request.seed,
            "prompt": list(request.prompt),
            "params": self._params(request.params),
        }

    def _params(self, params: SamplingParams) -> Line:
        """Return the options that are not the default, without names of salts and folders."""
        line: Line = {}
        for name, field in SamplingParams.fields().items():
            value = getattr(params, name)
            if value == field.default or value in ((), {}, OFF):
                continue
            if isinstance(value, Recovery):
                line[name] = dataclasses.replace(value, log_directory=None).to_json()
            elif name == "cache_salt":
                line[name] = self._salt(value)
            else:
                line[name] = _plain(value)
        return line

    def _salt(self, salt: str) -> str:
        """Return what the salt of a prefix is called."""
        return self._salts.setdefault(salt, f"salt {len(self._salts) + 1}")


def _plain(value: Any) -> Any:
    """Return mappings and sequences of options as those of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def described_work(work: SchedulerOutput | None) -> Line | None:
    """Return the work of a turn as JSON values; None for none."""
    if work is None:
        return None
    rows = work.sequences.items()
    return {
        "variant": work.variant.value,
        "prefill": work.prefill,
        "wide": work.wide,
        "steps": work.num_steps,
        "rows": {str(row): [sequence.number, work.attempts[row]] for row, sequence in rows},
        "drafts": {str(row): drafts for row, drafts in work.drafting.items()},
    }
