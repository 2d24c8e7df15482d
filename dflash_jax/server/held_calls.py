"""Filter for streamed tool calls that repeat the previous one; a third repetition ends the turn."""

from collections.abc import Iterable

from dflash_jax.tool_parsers.events import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


class RepeatedCallFilter:
    """Holds back calls that may equal the previous one, and everything after them.

    A call is held while its name equals that of the previous call and its arguments are a prefix
    of that call's. It is released, with everything after it, once it or a later call differs.
    Arguments are compared as text: equal values in another spelling count as different.
    """

    def __init__(self) -> None:
        self._held: list[Event] = []
        self._last: tuple[str, str] | None = None  # name and arguments of the last released call
        self._name = self._arguments = ""  # of the current call

    def push(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that are certainly part of the answer."""
        given: list[Event] = []
        for event in events:
            match event:
                case ToolCallStart(_, name):
                    self._name, self._arguments = name, ""
                    if self._last is None or name != self._last[0]:
                        given += self.release()
                    else:
                        self._held.append(event)
                        continue
                case ToolCallDelta(_, text):
                    self._arguments += text
                    if self._last is None or not self._last[1].startswith(self._arguments):
                        given += self.release()
                case ToolCallEnd():
                    call = (self._name, self._arguments)
                    if call != self._last:
                        given += self.release()
                        self._last = call
                case Content() | Thinking():
                    pass
            (self._held if self._held else given).append(event)
        return given

    def release(self) -> list[Event]:
        """Return the events held so far."""
        held, self._held = self._held, []
        return held

    def drop(self) -> bool:
        """Discard the events held so far; return whether there were any."""
        return bool(self.release())
