"""Splits a growing output into thoughts, content and tool calls; nothing given is taken back.

A call's name is given as soon as it is complete, its arguments as pieces of JSON as they are
written (XML and Gemma calls: value by value). Markup is never shown, nor is a call of a tool
that was not declared.

Readers are generators: they run until they need text that has not come yet, and yield.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from dflash_jax.tools.declared import Tool
from dflash_jax.tools.gemma4 import QUOTE
from dflash_jax.tools.syntax import Syntax


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a declared tool; calls are numbered from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallDone:
    """The call's arguments are complete."""

    index: int


Event = Thinking | Content | CallBegun | Arguments | CallDone
Reader = Generator[None, None, None]
HARMONY_HEADERS = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class OutputParser:
    """Feed it raw output text, special tokens included; it gives events.

    Args:
      syntax: the family's; None passes everything on as content.
      tools: the declared ones; without any, calls are not looked for.
      thinking: whether the prompt opened a thought.
    """

    def __init__(
        self, syntax: Syntax | None, tools: Sequence[Tool] = (), *, thinking: bool = False
    ):
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._text = _Text()
        self._events: list[Event] = []
        self._blank = ""  # white space that is content only if content follows
        self._trim = False  # drop white space before the next content: a thought or call ended
        self._live = False  # the call being read is of a declared tool
        self.thinking = thinking and syntax is not None and syntax.thought is not None
        self.unfinished = False  # the output ended inside a call
        self.calls = 0
        self._reader = self._harmony() if self._harmonic else self._tagged()

    def push(self, text: str) -> list[Event]:
        """What this text makes certain."""
        self._text.buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        self._text.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        try:
            next(self._reader, None)
        except _Ended:
            self.unfinished = True
        if self._text.ended and self._blank and not self.calls:
            self._events.append(Content(self._blank))
        events, self._events = self._events, []
        return list(_joined(events))

    @property
    def _harmonic(self) -> bool:
        return self._syntax is not None and self._syntax.name == "harmony"

    # -- the outermost level ------------------------------------------------------------------

    def _tagged(self) -> Reader:
        """Every family but harmony: markers stand in the text."""
        syntax, text = self._syntax, self._text
        thought = syntax.thought if syntax else None
        opens = syntax.opens if syntax and self._tools else ()
        closes = tuple(c for c in syntax.closes if c.startswith("<")) if syntax and opens else ()
        while True:
            if self.thinking and thought:
                marker = yield from text.flow((thought.closing,), self._show)
            else:
                around = (thought.opening, thought.closing) if thought else ()
                marker = yield from text.flow((*around, *opens, *closes), self._show)
            if marker is None:
                return
            if thought and marker in (thought.opening, thought.closing):
                self.thinking, self._trim = marker == thought.opening, True
            elif marker in opens:
                text.keep_record(marker)
                yield from self._call(marker)

    def _harmony(self) -> Reader:
        """Messages with headers, in channels."""
        text = self._text
        while True:
            marker = yield from text.flow(HARMONY_HEADERS + HARMONY_ENDS, self._show)
            if marker is None:
                return
            self.thinking = False
            if marker in HARMONY_ENDS:
                continue
            header = marker + (yield from text.until("<|message|>"))
            self.thinking, self._trim = "<|channel|>analysis" in header, False
            if (named := re.search(r"to=functions\.([^\s<]+)", header)) and self._tools:
                self._begin(named[1])
                yield from text.value(self._give)
                self._done()
                yield from text.flow(HARMONY_ENDS, _ignore)

    def _call(self, marker: str) -> Reader:
        """One call; what is none is dropped to its closing tag, or shown if it has no tags."""
        assert self._syntax is not None
        self._live = False
        readers = {"hermes": self._json, "qwen_xml": self._xml, "gemma4": self._gemma}
        before = self.calls
        try:
            if marker == '{"name"':
                self._text.buffer = marker + self._text.buffer
            if marker != "<function=":
                yield from readers.get(self._syntax.name, self._json)()
            else:
                yield from self._function()
        except (_NoCall, _Ended) as reason:
            if marker == '{"name"' and self.calls == before:
                self._show(self._text.record)
            elif isinstance(reason, _Ended):
                raise
            else:
                yield from self._text.flow(self._syntax.closes, _ignore)

    # -- one call -----------------------------------------------------------------------------

    def _json(self) -> Reader:
        """An object with `name`, and `arguments` or `parameters`."""
        text = self._text
        held = ""  # arguments that came before the name
        named = False
        yield from text.expect("{")
        while True:
            key = yield from text.string()
            yield from text.expect(":")
            if key == "name":
                named = True
                self._begin((yield from text.string()))
                self._give(held)
            elif key in ("arguments", "parameters"):
                pieces: list[str] = []
                yield from text.value(self._give if named else pieces.append)
                held += "".join(pieces)
            else:
                yield from text.value(_ignore)
            if (yield from text.character()) != ",":
                break
        if not named:
            raise _NoCall
        self._done()

    def _xml(self) -> Reader:
        yield from self._text.expect("<function=")
        yield from self._function()

    def _function(self) -> Reader:
        """`NAME>`, parameter blocks, `</function>`."""
        text = self._text
        name = (yield from text.until(">")).strip()
        self._begin(name)
        lead = "{"
        while (yield from text.one_of("<parameter=", "</function>")) == "<parameter=":
            key = (yield from text.until(">")).strip()
            raw = yield from text.until("</parameter>")
            value = typed(raw.removeprefix("\n").removesuffix("\n"), self._tools.get(name), key)
            self._give(f"{lead}{_json(key)}: {_json(value)}")
            lead = ", "
        self._give("{}" if lead == "{" else "}")
        self._done()

    def _gemma(self) -> Reader:
        """`call:NAME{key:value,...}`."""
        text = self._text
        yield from text.expect("call:")
        self._begin((yield from text.until("{")).strip())
        lead = "{"
        while (yield from text.peek()) != "}":
            key = (yield from text.until(":")).strip()
            value = yield from text.gemma_value()
            self._give(f"{lead}{_json(key)}: {_json(value)}")
            lead = ", "
            if (yield from text.peek()) == ",":
                yield from text.character()
        yield from text.character()
        self._give("{}" if lead == "{" else "}")
        self._done()

    # -- events -------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        self._live = name in self._tools
        if self._live:
            self._blank = ""
            self._events.append(CallBegun(self.calls, name))
            self.calls += 1

    def _give(self, text: str) -> None:
        if self._live and text:
            self._events.append(Arguments(self.calls - 1, text))

    def _done(self) -> None:
        self._trim = True
        if self._live:
            self._events.append(CallDone(self.calls - 1))
            self._live = False

    def _show(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if not text:
            return
        if self.thinking:
            self._events.append(Thinking(text))
            return
        text = self._blank + text
        shown = text.rstrip() if self._tools else text
        self._blank = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))


class _Ended(Exception):
    """The output ended where a reader needs more."""


class _NoCall(Exception):
    """What was begun like a call is none."""


class _Text:
    """Text that is still arriving. Its generators yield while they wait for more."""

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.record = ""  # what was taken since `keep_record`

    def keep_record(self, start: str) -> None:
        self.record = "" if start == '{"name"' else start

    def _take(self, count: int) -> str:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self.record += taken
        return taken

    def _more(self) -> Reader:
        if self.ended:
            raise _Ended
        yield

    def flow(
        self, markers: Iterable[str], show: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Shows text as it becomes certain, up to a marker, which it takes and returns."""
        markers = tuple(markers)
        while True:
            found = [(at, -len(m), m) for m in markers if (at := self.buffer.find(m)) >= 0]
            if found:
                at, _, marker = min(found)
                show(self._take(at))
                self._take(len(marker))
                return marker
            keep = 0 if self.ended else max((overlap(self.buffer, m) for m in markers), default=0)
            show(self._take(len(self.buffer) - keep))
            if self.ended:
                return None
            yield

    def until(self, marker: str) -> Generator[None, None, str]:
        """The text before a marker, which is taken too."""
        while (at := self.buffer.find(marker)) < 0:
            yield from self._more()
        return self._take(at + len(marker))[:at]

    def peek(self) -> Generator[None, None, str]:
        """The next character that is not white space; it stays."""
        while not (rest := self.buffer.lstrip()):
            yield from self._more()
        self._take(len(self.buffer) - len(rest))
        return rest[0]

    def character(self) -> Generator[None, None, str]:
        """The next character that is not white space."""
        yield from self.peek()
        return self._take(1)

    def one_of(self, *words: str) -> Generator[None, None, str]:
        """Takes one of these words after white space."""
        while True:
            yield from self.peek()
            for word in words:
                if self.buffer.startswith(word):
                    return self._take(len(word))
            if not any(word.startswith(self.buffer) for word in words):
                raise _NoCall
            yield from self._more()

    def expect(self, word: str) -> Reader:
        yield from self.one_of(word)

    def string(self) -> Generator[None, None, str]:
        """A JSON string."""
        if (yield from self.peek()) != '"':
            raise _NoCall
        pieces: list[str] = []
        yield from self.value(pieces.append, unpack=False)
        try:
            return json.loads("".join(pieces))
        except json.JSONDecodeError:
            raise _NoCall from None

    def value(self, show: Callable[[str], None], *, unpack: bool = True) -> Reader:
        """Shows a JSON value's text; an object that was written as a string is unpacked."""
        first = yield from self.peek()
        if first == '"' and unpack:
            text = yield from self.string()
            show(text if text.lstrip().startswith("{") else json.dumps(text))
            return
        depth, quoted, at = 0, False, 0
        while True:
            while at >= len(self.buffer):
                if first in '{["':
                    show(self._take(at))
                    at = 0
                yield from self._more()
            c = self.buffer[at]
            if quoted:
                if c == "\\":
                    while at + 1 >= len(self.buffer):
                        yield from self._more()
                    at += 1
                quoted = c != '"'
            elif c == '"':
                quoted = True
            elif c in "{[":
                depth += 1
            elif c in "}]":
                depth -= 1
            scalar = first not in '{["'
            if scalar and (depth < 0 or c == "," or c.isspace()):
                return show(self._take(at))
            at += 1
            if not scalar and depth == 0 and not quoted:
                return show(self._take(at))

    def gemma_value(self) -> Generator[None, None, Any]:
        """A value in Gemma's notation."""
        first = yield from self.peek()
        if first == "<":
            yield from self.expect(QUOTE)
            return (yield from self.until(QUOTE))
        if first in "{[":
            yield from self.character()
            items: dict[str, Any] = {}
            while (yield from self.peek()) not in "}]":
                key = str(len(items)) if first == "[" else (yield from self.until(":")).strip()
                items[key] = yield from self.gemma_value()
                if (yield from self.peek()) == ",":
                    yield from self.character()
            yield from self.character()
            return list(items.values()) if first == "[" else items
        at = 0
        while not (end := re.search(r"[,}\]]", self.buffer)):
            yield from self._more()
        at = end.start()
        word = self._take(at).strip()
        try:
            return json.loads(word)
        except json.JSONDecodeError:
            return word


def typed(text: str, tool: Tool | None, parameter: str) -> Any:
    """The value of an XML parameter, by the type its tool declares; a text if that fails."""
    properties = tool.parameters.get("properties") if tool else None
    schema = properties.get(parameter) if isinstance(properties, dict) else None
    kinds = set(_types(schema)) if isinstance(schema, dict) else set()
    if text == "null":
        return None
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text.lower() if "boolean" in kinds else text)
    except json.JSONDecodeError:
        return text


def _types(schema: dict[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ()
    for word in ("anyOf", "oneOf"):
        for part in schema.get(word) or ():
            if isinstance(part, dict):
                yield from _types(part)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


def _ignore(_: str) -> None:
    pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Neighbouring texts of one kind as one event."""
    last: Event | None = None
    for event in events:
        match last, event:
            case (Thinking(a), Thinking(b)):
                last = Thinking(a + b)
            case (Content(a), Content(b)):
                last = Content(a + b)
            case (Arguments(i, a), Arguments(j, b)) if i == j:
                last = Arguments(i, a + b)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last
