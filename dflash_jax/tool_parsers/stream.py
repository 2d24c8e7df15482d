"""Splits a growing output into thoughts, content and tool calls; nothing given is taken back.

A call's name is given as soon as it is complete, its arguments as pieces of JSON as they are
written (XML and Gemma calls: value by value); a call of an undeclared tool is given once it is
complete. Markup is not shown unless a text is about it. What begins like a call and cannot be read
as one is content, markup included: no output is lost.
"""

import re
from collections.abc import Generator, Sequence

from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.calls import CallParser
from dflash_jax.tool_parsers.events import Content, Event, Thinking, ToolCallStart, joined
from dflash_jax.tool_parsers.incremental import EndOfOutput, NotACall, ParseSteps, TextBuffer
from dflash_jax.tool_parsers.malformed_calls import ShownText
from dflash_jax.tool_parsers.stops import Stops
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import Tool

HARMONY_HEADERS = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MESSAGE = "<|message|>"
RECIPIENT = " to=functions."


class StopStringFound(Exception):
    """A stop string came."""


class OutputParser:
    """Feed it raw output text, special tokens included; it gives events.

    Attributes:
      thinking: what comes next is a thought.
      calling: a call is being read.
      unfinished: the output ended inside a call, or inside a header of harmony.
      unreadable: calls that could not be read, and are content.
      empty_calls: tags of a call without anything between them.

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
        lenient: bool = True,
    ):
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._text = TextBuffer()
        self._stops, self._lenient = Stops(stop), lenient
        self._shown = ShownText()  # the content as it was written
        self._events: list[Event] = []
        self._blank = ""  # white space that is content only if content follows
        self._blank_before = ""  # white space in front of the call that is being read
        self.thinking = thinking and syntax is not None and syntax.thought is not None
        self._trim = self.thinking  # drop white space: a thought began, or a thought or call ended
        self.calling = self.unfinished = False
        self.unreadable = self.empty_calls = 0
        self._tags_shown = 0  # tags of calls that were shown: as many closing ones are shown, too
        self._hidden_tags = ""  # tags that were not shown; they are if nothing else is
        self._nothing_emitted = True  # no thought, content or call was given yet
        self._unfinished_text = ""  # of the call that the output ended in
        self._calls = CallParser(
            syntax, self._tools, self._text, self._on_call_event, allow_undeclared=lenient
        )
        self._reader = self._parse_harmony() if self._is_harmony else self._parse_tagged()

    def push(self, text: str) -> list[Event]:
        """What this text makes certain."""
        self._text.buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        self._text.ended = True
        return self._advance()

    def unfinished_call(self) -> list[Event]:
        """Give the text of the call that the output ended in, where the model ended it there."""
        last, self._unfinished_text = self._unfinished_text, ""
        self.unreadable += bool(last)
        self._write(last)
        return self._take_events()

    @property
    def calls(self) -> int:
        """Calls that were begun, and those of undeclared tools that are complete."""
        return self._calls.count

    @property
    def undeclared(self) -> list[str]:
        """Names of undeclared tools that were called."""
        return self._calls.undeclared

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    @property
    def waiting(self) -> int:
        """Characters that came last, and may yet begin a stop string or do already."""
        if self.calling and self._calls.begun:
            return 0
        return self._text.recorded + len(self._stops.held) + len(self._text.buffer)

    def _advance(self) -> list[Event]:
        try:
            next(self._reader, None)
        except EndOfOutput:
            self.unfinished = True
        except StopStringFound:
            pass
        if self._text.ended and not self.calls:
            blank, self._blank = self._blank, ""
            if self._nothing_emitted and not self.unfinished and self.stopped_by is None:
                blank, self._hidden_tags = blank + self._hidden_tags, ""
            if blank:
                self._events.append(Content(blank))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return list(joined(events))

    @property
    def _is_harmony(self) -> bool:
        return self._syntax is not None and self._syntax.name == "harmony"

    # -- the outermost level ------------------------------------------------------------------

    def _parse_tagged(self) -> ParseSteps:
        """Every family but harmony: markers stand in the text."""
        syntax, text = self._syntax, self._text
        thought = syntax.thought if syntax else None
        around = (thought.opening, thought.closing) if thought else ()
        opens = syntax.opens if syntax and self._tools else ()
        closes = tuple(c for c in syntax.closes if c.startswith("<")) if syntax and opens else ()
        loose: tuple[str, ...] = ()
        if opens and self._lenient:
            opens, closes = (*opens, *malformed_calls.OPENS), (*closes, *malformed_calls.CLOSES)
            loose = malformed_calls.untagged_openings(self._tools, (*around, *opens))
        while True:
            if self.thinking and thought:
                marker = yield from text.scan(around, self._show)
            else:
                if loose and (yield from self._try_bare_arguments()):
                    return
                marker = yield from text.scan((*around, *opens, *closes, *loose), self._show)
            if marker is None:
                self._flush_stops("")
                return
            if thought and self.thinking and marker == thought.opening and not self._trim:
                self._show(marker)
                continue
            bare = marker in loose or not marker.startswith("<")
            if not bare:
                self._flush_stops(marker if marker in around else "")
            if thought and marker in around:
                self.thinking, self._trim = marker == thought.opening, True
            elif marker in opens and not (bare and self._shown.within_object):
                yield from self._parse_call(marker, bare=bare)
            elif marker in loose and self._shown.allows(marker):
                yield from self._parse_call(marker, bare=True)
            elif bare:
                self._show(marker)
            elif self._tags_shown:
                self._tags_shown -= 1
                self._show(marker)
            else:
                self._hidden_tags += marker

    def _parse_harmony(self) -> ParseSteps:
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
                marker = yield from text.scan(HARMONY_HEADERS + HARMONY_ENDS, self._show)
                self._flush_stops(marker or "")
                if marker is None:
                    return
                self.thinking = False
                if marker in HARMONY_ENDS:
                    continue
                header = marker + (yield from text.until(HARMONY_MESSAGE))
            self.thinking, self._trim = "<|channel|>analysis" in header, False
            named = re.search(r"to=functions\.([^\s<]+)", header) if self._tools else None
            if named and (yield from self._try_call(self._calls.harmony(named[1]))):
                self.calling = True
                yield from text.scan(HARMONY_ENDS, _ignore)
                self.calling = False
            header = ""

    def _parse_call(self, marker: str, *, bare: bool) -> ParseSteps:
        """One call, or the text that only begins like one.

        Args:
          bare: the marker is part of the call, not a tag around it.
        """
        text = self._text
        text.buffer = marker + text.buffer
        read = yield from self._try_call(
            self._calls.parse(marker, bare=bare), tag=0 if bare else len(marker)
        )
        if read:
            self._shown.add("\n")
            self._tags_shown = 0
        elif self._calls.empty:
            self.empty_calls += 1
            self._hidden_tags += text.take(len(marker))
        else:
            self._tags_shown += not bare
            if not self._calls.begun:  # else it was shown
                self._show(text.take(len(marker)))

    def _try_call(self, call: ParseSteps, tag: int = 0) -> Generator[None, None, bool]:
        """Whether a call could be read; if not, what was taken is put back or, late, shown.

        Args:
          tag: characters in front of the call that belong to its markup.

        Raises:
          Ended: the output ended inside it.
        """
        text, calls = self._text, self._calls
        self.calling = True
        text.start_recording()
        text.take(tag)
        try:
            yield from call
        except (NotACall, EndOfOutput) as reason:
            if isinstance(reason, EndOfOutput) and (tag or calls.begun or self._is_harmony):
                blank = self._blank_before if calls.begun else ""
                self._unfinished_text = blank + text.stop_recording()
                raise
            self.calling = False
            self.unreadable += calls.certain and not calls.empty
            if calls.begun:
                self._shown.add(written := text.stop_recording())
                self._write(self._blank_before + written)
            else:
                text.rewind()
            return False
        text.stop_recording()
        self.calling, self._trim = False, True
        return True

    def _try_bare_arguments(self) -> Generator[None, None, bool]:
        """Whether the output was nothing but the arguments of the only tool."""
        if len(self._tools) > 1 or self.calls or not self._shown.blank:
            return False
        [tool] = self._tools.values()
        self._text.start_recording()
        try:
            yield from self._calls.bare_arguments(tool)
        except (NotACall, EndOfOutput):
            self._text.rewind()
        self._text.stop_recording()
        return self.calls > 0

    def _on_call_event(self, event: Event) -> None:
        if isinstance(event, ToolCallStart):
            self._flush_stops("")
            self._blank_before, self._blank = self._blank, ""
        self._events.append(event)

    def _show(self, text: str) -> None:
        if not self.thinking:
            self._shown.add(text)
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        self._emit(self._stops.push(text))

    def _flush_stops(self, marker: str) -> None:
        """What might have become a stop string, where a marker or the end follows."""
        self._emit(self._stops.flush(marker))

    def _emit(self, text: str) -> None:
        self._write(text)
        if self._stops.found is not None:
            raise StopStringFound

    def _write(self, text: str) -> None:
        if not text:
            return
        if self.thinking:
            self._events.append(Thinking(text))
            self._nothing_emitted = False
            return
        text = self._blank + text
        shown = text.rstrip() if self._tools else text
        self._blank = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))
            self._nothing_emitted = False


def _ignore(_: str) -> None:
    pass
