"""Incremental parser that splits output into reasoning, content and tool calls.

Events are never retracted. A call's name is emitted as soon as it is complete, and its arguments as
JSON text while they arrive (value by value for XML and Gemma calls). Calls to undeclared tools are
emitted once complete. Markup is hidden unless the text is about markup. Text that starts like a
call but cannot be parsed as one becomes content, markup included, so that no output is lost.
"""

import re
from collections.abc import Callable, Generator, Sequence

from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.calls import (
    CallParser,
    Content,
    Event,
    Thinking,
    ToolCallStart,
    calls_of,
    joined,
)
from dflash_jax.tool_parsers.families import RECIPIENT
from dflash_jax.tool_parsers.incremental import EndOfOutput, NotACall, ParseSteps, Stops, TextBuffer
from dflash_jax.tool_parsers.malformed_calls import FENCE, ShownText, are_valid_arguments
from dflash_jax.tool_parsers.syntax import Syntax, Thought
from dflash_jax.tool_parsers.tool_schema import Tool

HARMONY_HEADERS = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MESSAGE = "<|message|>"


class StopStringFound(Exception):
    """A stop string was found."""


class OutputParser:
    """Parses raw output text, including special tokens, into events.

    Attributes:
      thinking: the next text is reasoning.
      calling: the next text is part of a call.
      unfinished: the output ended inside a call, or inside a header of harmony.
      unreadable: number of calls that could not be parsed, and became content.
      empty_calls: number of call tags without content.

    Args:
      syntax: syntax of the model's family; None makes all output content.
      tools: the declared tools; if empty, calls are not parsed.
      thinking: the prompt ends inside reasoning.
      continued: the output continues a text, so that white space at its start is kept.
      stop: stop strings. They are searched in reasoning, its closing markup and content, but not
        in calls.
      lenient: also parse calls in the syntax of other families. Use False for output that follows
        a grammar.
      fenced: returns whether calls in code fences at the end of the output are calls after this
        text; None leaves all of them as content.
    """

    def __init__(
        self,
        syntax: Syntax | None,
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        continued: bool = False,
        stop: Sequence[str] = (),
        lenient: bool = True,
        fenced: Callable[[str], bool] | None = None,
    ):
        self._fenced = fenced
        self._syntax = syntax
        self._tools = {tool.name: tool for tool in tools}
        self._text = TextBuffer()
        self._stops = Stops(stop)
        self._lenient = lenient
        self._shown = ShownText()  # content, before white space is trimmed
        self._events: list[Event] = []
        self._blank = ""  # white space that is content only if content follows
        self._blank_before = ""  # white space before the current call
        self.thinking = thinking and syntax is not None and syntax.thought is not None
        # Drop white space at the start of reasoning, and after calls.
        self._trim = self.thinking and not continued
        self.calling = self.unfinished = False
        self.unreadable = self.empty_calls = 0
        self._tags_shown = 0  # opening tags shown as content: as many closing ones are shown
        self._hidden_tags = ""  # hidden tags, which are shown if the output has nothing else
        self._nothing_emitted = True
        self._unfinished_text = ""  # text of the call in which the output ended
        self._calls = CallParser(
            syntax, self._tools, self._text, self._on_call_event, allow_undeclared=lenient
        )
        self._reader = self._parse_harmony() if self._is_harmony else self._parse_tagged()

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        self._text.buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the output."""
        self._text.ended = True
        return self._advance()

    def unfinished_call(self) -> list[Event]:
        """Return the call in which the output ended as content, since the model ended it there."""
        last = self._unfinished_text
        self._unfinished_text = ""
        if last:
            self.unreadable += 1
        self._write(last)
        return self._take_events()

    @property
    def calls(self) -> int:
        """Return the number of emitted calls."""
        return self._calls.count

    @property
    def undeclared(self) -> list[str]:
        """Return the names of undeclared tools that were called."""
        return self._calls.undeclared

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that ended the output."""
        return self._stops.found

    @property
    def waiting(self) -> int:
        """Return how many of the last characters are, or may become, part of a stop string."""
        if self.calling and self._calls.begun:
            return 0
        return self._text.recorded + len(self._stops.held) + len(self._text.buffer)

    @property
    def undecided(self) -> bool:
        """Whether text waits that may be content, a call, or white space that is left out."""
        return self.calling or bool(self._blank) or self.waiting > 0

    def _advance(self) -> list[Event]:
        try:
            next(self._reader, None)
        except EndOfOutput:
            self.unfinished = True
        except StopStringFound:
            pass
        if self._text.ended and not self.calls:
            blank = self._blank
            self._blank = ""
            if self._nothing_emitted and not self.unfinished and self.stopped_by is None:
                blank += self._hidden_tags
                self._hidden_tags = ""
            if blank:
                self._events.append(Content(blank))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return list(joined(events))

    @property
    def _is_harmony(self) -> bool:
        return self._syntax is not None and bool(self._syntax.channels)

    # -- the outermost level ------------------------------------------------------------------

    def _parse_tagged(self) -> ParseSteps:
        """Parse the syntax of all families but harmony: text with markers."""
        syntax = self._syntax
        text = self._text
        thought = syntax.thought if syntax else None
        around = (thought.opening, thought.closing) if thought else ()
        opens = syntax.opens if syntax and self._tools else ()
        closes = tuple(c for c in syntax.closes if c.startswith("<")) if syntax and opens else ()
        loose: tuple[str, ...] = ()
        if opens and self._lenient:
            opens = (*opens, *malformed_calls.OPENS)
            closes = (*closes, *malformed_calls.CLOSES)
            loose = malformed_calls.untagged_openings(self._tools, (*around, *opens))
            if self._fenced is not None:
                loose = (*loose, FENCE)
        tags = tuple(marker for marker in opens if marker.startswith("<"))
        while True:
            if self.thinking and thought:
                marker = yield from text.scan((*around, *tags), self._show)
                if marker in tags:
                    yield from self._parse_thought_call(marker, tags, thought)
                    continue
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
                self.thinking = marker == thought.opening
                self._trim = True
            elif marker in opens and not (bare and self._shown.within_object):
                yield from self._parse_call(marker, bare=bare)
            elif marker in loose and self._shown.allows(marker):
                if marker == FENCE:
                    yield from self._parse_fenced_calls()
                else:
                    yield from self._parse_call(marker, bare=True)
            elif bare:
                self._show(marker)
            elif self._tags_shown:
                self._tags_shown -= 1
                self._show(marker)
            else:
                self._hidden_tags += marker

    def _parse_harmony(self) -> ParseSteps:
        """Parse harmony: messages in channels, with headers.

        The prompt ends inside the first header, which may name a call's tool before the channel.
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
            self.thinking = "<|channel|>analysis" in header
            self._trim = False
            name = self._recipient(header)
            if name and (yield from self._try_call(self._calls.harmony(name))):
                self.calling = True
                yield from text.scan(HARMONY_ENDS, _ignore)
                self.calling = False
            header = ""

    def _recipient(self, header: str) -> str | None:
        """Return the tool that a message of harmony calls; without `functions.`, a declared one."""
        match = re.search(r"to=(functions\.)?([^\s<]+)", header) if self._tools else None
        return match[2] if match and (match[1] or match[2] in self._tools) else None

    def _parse_call(self, marker: str, *, bare: bool) -> ParseSteps:
        """Parse a call, or emit text that only starts like one.

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
            if not bare:
                self._tags_shown += 1
            if not self._calls.begun:  # otherwise the text was emitted
                self._show(text.take(len(marker)))

    def _parse_thought_call(
        self, marker: str, tags: tuple[str, ...], thought: Thought
    ) -> ParseSteps:
        """Parse calls inside reasoning: they are calls if the output ends with them, else text.

        The model may still have closed the reasoning after them.
        """
        text = self._text
        events: list[Event] = []
        closes = self._syntax.closes if self._syntax else ()
        calls = self._last_calls(marker, events)
        following = marker
        try:
            while following in tags:
                text.take(len(following))
                yield from calls.parse(following)
                following = yield from self._next_marker((*tags, *closes, thought.closing))
                while following in closes:
                    text.take(len(following))
                    following = yield from self._next_marker((*tags, *closes, thought.closing))
            if following == thought.closing:
                text.take(len(following))
                following = yield from self._next_marker(())
        except (NotACall, EndOfOutput):
            following = marker
        if following:
            text.rewind()
            self._show(text.take(len(marker)))
            return
        self.thinking = False
        self._end_with(calls, events)

    def _parse_fenced_calls(self) -> ParseSteps:
        """Parse calls in code fences: they are calls if the output ends with them, else text."""
        text = self._text
        events: list[Event] = []
        calls = self._last_calls(FENCE, events)
        try:
            if self._fenced is None or not self._fenced(self._shown.end):
                raise NotACall
            following = FENCE
            while following == FENCE:
                yield from calls.fenced()
                following = yield from self._next_marker((FENCE,))
            if not all(
                are_valid_arguments(self._tools[n], args) for n, args, _ in calls_of(events)
            ):
                raise NotACall
        except (NotACall, EndOfOutput):
            text.rewind()
            self._show(text.take(len(FENCE)))
            return
        self._end_with(calls, events)

    def _last_calls(self, marker: str, events: list[Event]) -> CallParser:
        """Return a parser of calls that the output may end with, from their marker on."""
        text = self._text
        text.buffer = marker + text.buffer
        calls = CallParser(self._syntax, self._tools, text, events.append, allow_undeclared=False)
        calls.count = self._calls.count
        text.start_recording()
        return calls

    def _end_with(self, calls: CallParser, events: list[Event]) -> None:
        """Emit the calls that the output ended with."""
        self._text.stop_recording()
        self._flush_stops("")
        self._calls.count = calls.count
        self._blank = ""
        self._events += events

    def _next_marker(self, markers: tuple[str, ...]) -> Generator[None, None, str]:
        """Return which marker follows white space; empty at the end of the output.

        Raises:
          NotACall: something else follows.
        """
        text = self._text
        while not text.buffer.strip():
            if text.ended:
                return ""
            yield
        try:
            return (yield from text.one_of(*markers, take=False)) if markers else "text"
        except EndOfOutput:
            raise NotACall from None

    def _try_call(self, call: ParseSteps, tag: int = 0) -> Generator[None, None, bool]:
        """Run a call parser, and return whether the text was a call.

        If not, the text is put back, or emitted as content if events of the call were emitted.

        Args:
          tag: number of characters of the tag before the call.

        Raises:
          EndOfOutput: the output ended inside the call.
        """
        text = self._text
        calls = self._calls
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
            if calls.certain and not calls.empty:
                self.unreadable += 1
            if calls.begun:
                written = text.stop_recording()
                self._shown.add(written)
                self._write(self._blank_before + written)
            else:
                text.rewind()
            return False
        text.stop_recording()
        self.calling = False
        self._trim = True
        return True

    def _try_bare_arguments(self) -> Generator[None, None, bool]:
        """Return whether the whole output was the arguments of the only tool."""
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
            self._blank_before = self._blank
            self._blank = ""
        self._events.append(event)

    def _show(self, text: str) -> None:
        if not self.thinking:
            self._shown.add(text)
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        self._emit(self._stops.push(text))

    def _flush_stops(self, marker: str) -> None:
        """Emit text that was held back for stop strings, since a marker or the end follows."""
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
