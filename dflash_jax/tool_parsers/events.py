"""What a reader of outputs tells: thoughts, content, and calls as they are written."""

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
    """A call of a declared tool; calls are numbered from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call's arguments are complete."""

    index: int


Event = Thinking | Content | ToolCallStart | ToolCallDelta | ToolCallEnd


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Neighbouring texts of one kind as one event."""
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
