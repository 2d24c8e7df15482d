"""Holds back streamed calls that repeat the one before: a third equal one ends the turn."""

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
    """Pass events on, but for calls that so far equal the last one, and what follows them.

    A call is held while its name is that of the call before and its arguments begin as that one's
    do. It is released with everything after it once it differs, or when a call after it does. Calls
    that mean the same and are spelled differently are not held.
    """

    def __init__(self) -> None:
        self._held: list[Event] = []
        self._last: tuple[str, str] | None = None  # the last complete call that was passed on
        self._name = self._arguments = ""  # of the call that is being written

    def push(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that are certain to be part of the answer, in order."""
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
        """Return what was held; nothing repeats the call before any more."""
        held, self._held = self._held, []
        return held

    def drop(self) -> bool:
        """Forget what was held; return whether that was anything."""
        return bool(self.release())
