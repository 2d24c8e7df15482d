"""A filter of streamed tool calls that repeat the one before."""

from collections.abc import Iterable

from dflash_jax.tool_parsers.calls import (
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
        # The current call.
        self._name = ""
        self._arguments = ""

    def push(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that are certainly part of the answer."""
        released: list[Event] = []
        for event in events:
            starts_repetition = False
            match event:
                case ToolCallStart(_, name):
                    self._name = name
                    self._arguments = ""
                    if self._last is not None and name == self._last[0]:
                        starts_repetition = True
                    else:
                        released += self.release()
                case ToolCallDelta(_, text):
                    self._arguments += text
                    if self._last is None or not self._last[1].startswith(self._arguments):
                        released += self.release()
                case ToolCallEnd():
                    call = (self._name, self._arguments)
                    if call != self._last:
                        released += self.release()
                        self._last = call
                case Content() | Thinking():
                    pass
            if self._held or starts_repetition:
                self._held.append(event)
            else:
                released.append(event)
        return released

    def release(self) -> list[Event]:
        """Return the events held so far, which are held no longer."""
        held = self._held
        self._held = []
        return held
