"""Events of parsed output: reasoning, content, and tool calls."""

import dataclasses
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call starts. Calls are numbered from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call's arguments are complete."""

    index: int


Event = Thinking | Content | ToolCallStart | ToolCallDelta | ToolCallEnd


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events with adjacent texts of one kind merged."""
    last: Event | None = None
    for event in events:
        match last, event:
            case (Thinking(a), Thinking(b)):
                last = Thinking(a + b)
            case (Content(a), Content(b)):
                last = Content(a + b)
            case (ToolCallDelta(i, a), ToolCallDelta(j, b)) if i == j:
                last = ToolCallDelta(i, a + b)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last
