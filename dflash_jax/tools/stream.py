"""Splits a growing output into thoughts, content and tool calls; nothing given is taken back.

A call's name is given as soon as it is complete, its arguments as pieces of JSON as they are
written (XML and Gemma calls: value by value). Markup is not shown unless a text is about it, nor
is a call in tags of a tool that was not declared.
"""

import contextlib
import re
from collections.abc import Generator, Sequence

from dflash_jax.tools import slips
from dflash_jax.tools.arriving import Arriving, Ended, NoCall, Reader
from dflash_jax.tools.calls import CallReader
from dflash_jax.tools.declared import Tool
from dflash_jax.tools.events import CallBegun, Content, Event, Thinking, joined
from dflash_jax.tools.slips import Before
from dflash_jax.tools.stops import Stops
from dflash_jax.tools.syntax import Syntax

HARMONY_HEADERS = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MESSAGE = "<|message|>"
RECIPIENT = " to=functions."


class Stopped(Exception):
    """A stop string came."""


class OutputParser:
    """Feed it raw output text, special tokens included; it gives events.

    Args:
      syntax: the family's; None passes everything on as content.
      tools: the declared ones; without any, calls are not looked for.
      thinking: whether the prompt opened a thought.
      stop: texts that end the output, in thoughts, what closes them and content; calls may
        contain them.
      slips: read calls in forms of other families, too; not where a grammar says what comes.
    """

    def __init__(
        self,
        syntax: Syntax | None,
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        stop: Sequence[str] = (),
        slips: bool = True,
    ):
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._text = Arriving()
        self._stops, self._slips = Stops(stop), slips
        self._before = Before()  # the content as it was written
        self._events: list[Event] = []
        self._blank = ""  # white space that is content only if content follows
        self.thinking = thinking and syntax is not None and syntax.thought is not None
        self._trim = self.thinking  # drop white space: a thought began, or a thought or call ended
        self.calling = False  # a call is being read
        self.unfinished = False  # the output ended inside a call
        self.in_vain = ""  # the last thing said is a call of this tool, which was not declared
        self._calls = CallReader(syntax, self._tools, self._text, self._tell_call)
        self._reader = self._harmony() if self._harmonic else self._tagged()

    def push(self, text: str) -> list[Event]:
        """What this text makes certain."""
        self._text.buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        self._text.ended = True
        return self._advance()

    @property
    def calls(self) -> int:
        """Calls of declared tools that were begun."""
        return self._calls.count

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    @property
    def waiting(self) -> int:
        """Characters that came last, and may yet begin a stop string or do already."""
        text = self._text
        if self.calling and text.record is None:
            return 0
        return len(text.record or "") + len(self._stops.held) + len(text.buffer)

    def _advance(self) -> list[Event]:
        try:
            next(self._reader, None)
        except Ended:
            self.unfinished = True
        except Stopped:
            pass
        if self._text.ended and self._blank and not self.calls:
            self._events.append(Content(self._blank))
        events, self._events = self._events, []
        return list(joined(events))

    @property
    def _harmonic(self) -> bool:
        return self._syntax is not None and self._syntax.name == "harmony"

    # -- the outermost level ------------------------------------------------------------------

    def _tagged(self) -> Reader:
        """Every family but harmony: markers stand in the text."""
        syntax, text = self._syntax, self._text
        thought = syntax.thought if syntax else None
        around = (thought.opening, thought.closing) if thought else ()
        opens = syntax.opens if syntax and self._tools else ()
        closes = tuple(c for c in syntax.closes if c.startswith("<")) if syntax and opens else ()
        loose: tuple[str, ...] = ()
        if opens and self._slips:
            opens, closes = (*opens, *slips.OPENS), (*closes, *slips.CLOSES)
            loose = slips.untagged(self._tools, (*around, *opens))
        while True:
            if self.thinking and thought:
                marker = yield from text.flow(around, self._show)
            else:
                if loose and (yield from self._whole()):
                    return
                marker = yield from text.flow((*around, *opens, *closes, *loose), self._show)
            if marker is None:
                self._show_held("")
                return
            if thought and self.thinking and marker == thought.opening and not self._trim:
                self._show(marker)
                continue
            bare = marker in loose or not marker.startswith("<")
            if not bare:
                self._show_held(marker if marker in around else "")
            if thought and marker in around:
                self.thinking, self._trim = marker == thought.opening, True
            elif marker in opens and not (bare and self._before.within_object):
                yield from self._call(marker, [tag for tag in opens if tag[0] == "<"], bare=bare)
            elif marker in loose and self._before.allows(marker):
                yield from self._call(marker, bare=True)
            elif bare:
                self._show(marker)

    def _harmony(self) -> Reader:
        """Messages with headers, in channels. A prompt ends in the first header, where a call's
        tool may be named before the channel.
        """
        text = self._text
        while RECIPIENT.startswith(text.buffer) and not text.ended:
            yield
        header = ""
        if text.buffer.startswith(RECIPIENT):
            header = yield from text.until(HARMONY_MESSAGE)
        while True:
            if not header:
                marker = yield from text.flow(HARMONY_HEADERS + HARMONY_ENDS, self._show)
                self._show_held(marker or "")
                if marker is None:
                    return
                self.thinking = False
                if marker in HARMONY_ENDS:
                    continue
                header = marker + (yield from text.until(HARMONY_MESSAGE))
            self.thinking, self._trim = "<|channel|>analysis" in header, False
            if (named := re.search(r"to=functions\.([^\s<]+)", header)) and self._tools:
                self.calling = True
                with contextlib.suppress(NoCall):  # a text that is no JSON
                    yield from self._calls.harmony(named[1])
                    self.in_vain = self._calls.unknown
                self._trim = True
                yield from text.flow(HARMONY_ENDS, _ignore)
                self.calling = False
            header = ""

    def _call(self, marker: str, opens: Sequence[str] = (), *, bare: bool) -> Reader:
        """One call; what is none is text, or dropped to the next tag if only a call begins so."""
        assert self._syntax is not None
        text = self._text
        self.calling = True
        if bare or marker in slips.WORDS:
            text.buffer = marker + text.buffer
            text.keep_record()
            text.take(0 if bare else len(marker))
        try:
            yield from self._calls.read(marker)
            self.in_vain = self._calls.unknown
            self._trim = True
            self._before.add("\n")
        except (NoCall, Ended) as reason:
            if text.record is not None and (bare or isinstance(reason, NoCall)):
                text.put_back()
                text.drop_record()
                self.calling = False
                self._show(text.take(len(marker)))
            elif isinstance(reason, Ended):
                text.drop_record()
                raise
            else:
                tag = yield from text.flow((*opens, *self._syntax.closes, *slips.CLOSES), _ignore)
                if tag and tag in opens:
                    text.buffer = tag + text.buffer
        self.calling = False

    def _whole(self) -> Generator[None, None, bool]:
        """Whether the output was nothing but the arguments of the only tool."""
        if len(self._tools) > 1 or self.calls or not self._before.blank:
            return False
        [tool] = self._tools.values()
        self._text.keep_record()
        try:
            yield from self._calls.whole(tool)
        except (NoCall, Ended):
            self._text.put_back()
            self._text.drop_record()
        return self.calls > 0

    def _tell_call(self, event: Event) -> None:
        if isinstance(event, CallBegun):
            self._show_held("")
            self._blank = ""
        self._events.append(event)

    def _show(self, text: str) -> None:
        if not self.thinking:
            self._before.add(text)
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        self._tell(self._stops.push(text))

    def _show_held(self, marker: str) -> None:
        """What might have become a stop string, where a marker or the end follows."""
        self._tell(self._stops.flush(marker))

    def _tell(self, text: str) -> None:
        self._write(text)
        if self._stops.found is not None:
            raise Stopped

    def _write(self, text: str) -> None:
        if not text:
            return
        if self.thinking:
            self._events.append(Thinking(text))
            return
        text = self._blank + text
        shown = text.rstrip() if self._tools else text
        self._blank = text[len(shown) :]
        if shown:
            self.in_vain = ""
            self._events.append(Content(shown))


def _ignore(_: str) -> None:
    pass
