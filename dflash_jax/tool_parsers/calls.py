"""Events of parsed output, and parsers of tool calls in the syntax of each family."""

import dataclasses
import functools
import json
import re
import string
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.incremental import NotACall, ParseSteps, TextBuffer, bare_word_value
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import Tool, kinds_of, typed_value

# Events of parsed output: reasoning, content, and tool calls.


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


def calls_of(events: Iterable[Event]) -> list[tuple[str, str, bool]]:
    """Return the calls among events: their names and arguments, and whether they ended."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    ended: set[int] = set()
    for event in events:
        match event:
            case ToolCallStart(index, name):
                names[index] = name
                arguments[index] = ""
            case ToolCallDelta(index, text):
                arguments[index] += text
            case ToolCallEnd(index):
                ended.add(index)
    return [(name, arguments[index], index in ended) for index, name in names.items()]


ARGUMENTS = ("arguments", "parameters")
BEFORE_NAME = ("type", "id", *ARGUMENTS)  # keys of an object without tags before its name
NAME = re.compile(r"[\w.:/-]{1,128}")  # name of an undeclared tool
LANGUAGE = re.compile(r"[ \t]*[\w+-]*[ \t\r]*")  # after the opening of a code fence


class CallParser:
    """Parses calls. One to an undeclared tool may be text, and is emitted once complete.

    Attributes:
      count: number of emitted calls.
      begun: events of the current or last call were emitted.
      certain: the current or last call cannot be anything but a call.
      empty: the last call was a tag without content.
      undeclared: names of undeclared tools that were called, in order.

    Args:
      emit: receives the events.
      allow_undeclared: emit calls to undeclared tools.
    """

    def __init__(
        self, syntax: Syntax | None, tools: Mapping[str, Tool], text: TextBuffer,
        emit: Callable[[Event], None], *, allow_undeclared: bool = True,
    ):  # fmt: skip
        self._opens = syntax.opens if syntax else ()
        self._tools = tools
        self._text = text
        self._emit_event = emit
        self._allow_undeclared = allow_undeclared
        self._pending: list[Event] | None = None  # events of a call of an undeclared tool
        self.count = 0
        self.begun = self.certain = self.empty = False
        self.undeclared: list[str] = []

    def parse(self, marker: str, *, bare: bool = False) -> ParseSteps:
        """Return a parser of the call that starts with a marker.

        Args:
          bare: the marker is part of the call, not a tag, and was not taken.

        Raises:
          NotACall: (by the parser) the text is not a call.
          EndOfOutput: (by the parser) the output ended inside the call.
        """
        self._reset(certain=not bare and marker not in malformed_calls.AMBIGUOUS_OPENS)
        match marker:
            case "<tool_call>":
                return self._wrapped()
            case "<function=":
                return self._function("</function>")
            case "<|tool_call>":
                return self._gemma()
            case malformed_calls.CALL_PREFIX:
                return self._verb()
            case tag if tag.startswith("<") and tag[1:-1] in self._tools:
                return self._named_tag(tag)
            case text if text in malformed_calls.BARE_OPENS and text not in self._opens:
                return self._json(bare=True, declared=True)
        return self._json(bare=bare)

    def bare_arguments(self, tool: Tool) -> ParseSteps:
        """Parse the arguments of the only tool, if they are the whole output.

        Raises:
          NotACall, EndOfOutput: the output is something else; nothing was emitted.
        """
        text = self._text
        self._reset(certain=False)
        yield from text.expect("{")
        if (yield from text.string()) not in tool.properties:
            raise NotACall
        text.rewind()
        text.start_recording()
        pieces: list[str] = []
        yield from text.value(pieces.append, unpack=False)
        while not text.buffer.strip() and not text.ended:
            yield
        if text.buffer.strip() or not malformed_calls.is_arguments_object(tool, "".join(pieces)):
            raise NotACall
        text.take(len(text.buffer))
        self._start_call(tool.name)
        self._emit_arguments("".join(pieces).strip())
        self._end_call()

    def fenced(self) -> ParseSteps:
        """Parse a code fence that holds calls of declared tools and nothing else.

        There is one object, one after another, a list of them, or each between tags. The closing
        fence may be missing at the end of the output.
        """
        text = self._text
        self._reset(certain=False)
        yield from text.expect(malformed_calls.FENCE)
        if not LANGUAGE.fullmatch((yield from text.until("\n"))):
            raise NotACall
        if listed := (yield from text.peek()) == "[":
            yield from text.expect("[")
        following = ","
        while following != "]":
            self._reset(certain=False)
            tagged = (yield from text.peek()) == "<"
            if tagged:
                yield from text.expect("<tool_call>")
            yield from self._json(bare=True, declared=True)
            if tagged:
                yield from text.expect("</tool_call>")
            if listed:
                following = yield from text.one_of(",", "]")
                continue
            while not text.buffer.strip() and not text.ended:
                yield
            if not text.buffer.strip() or (yield from text.peek()) not in "{<":
                break
        while not text.buffer.strip() and not text.ended:
            yield
        if text.buffer.strip():
            yield from text.expect(malformed_calls.FENCE)

    def harmony(self, name: str) -> ParseSteps:
        """Parse the arguments of a call whose header contained the tool's name.

        Raises:
          NotACall: the text is neither an object nor empty.
        """
        self._reset(certain=True)
        if (yield from self._text.peek()) in '{"':
            self._start_call(name)
            yield from self._text.value(self._emit_arguments)
        else:
            yield from self._text.one_of("<|", "null", take=False)
            self._start_call(name)
            self._emit_arguments("{}")
        self._end_call()

    def _json(self, *, bare: bool = False, declared: bool = False) -> ParseSteps:
        """Parse an object with `name`, and `arguments` or `parameters`, or with it as `function`.

        Args:
          bare: there are no tags. If the tool is undeclared, only arguments may follow the name.
          declared: the tool has to be declared, and only arguments may follow its name.
        """
        text = self._text
        held = ""  # arguments that came before the name
        named = False  # whether the name was parsed
        has_arguments = False
        nested = False  # inside a `function` object
        yield from text.expect("{")
        while True:
            key = yield from text.string()
            yield from text.expect(":")
            first = yield from text.peek()
            if key == "function" and first == "{" and not (named or nested):
                nested = True
                yield from text.expect("{")
                continue
            if key in ("name", "function") and first == '"' and not named:
                named = True
                name = yield from text.string()
                if declared and name not in self._tools:
                    raise NotACall
                if declared or (bare and name not in self._tools):
                    yield from self._arguments_alone(name, nested=nested)
                    return
                self._start_call(name)
                self._emit_arguments(held)
            elif key in ARGUMENTS and not has_arguments:
                pieces: list[str] = []
                has_arguments = True
                yield from text.value(self._emit_arguments if named else pieces.append)
                held += "".join(pieces)
            elif bare and not named and key not in BEFORE_NAME:
                raise NotACall
            else:
                yield from text.value(_ignore)
            following = yield from self._after_value()
            if nested and following == "}":
                nested = False
                following = yield from self._after_value()
            if following != ",":  # if the closing brace is missing, markup follows
                break
        if not named:
            raise NotACall
        if not has_arguments:
            self._emit_arguments("{}")
        self._end_call()

    def _after_value(self) -> Generator[None, None, str]:
        """Return the next character, and take it if it is a comma or a closing brace."""
        if (following := (yield from self._text.peek())) in ",}":
            yield from self._text.character()
        return following

    def _arguments_alone(self, name: str, *, nested: bool) -> ParseSteps:
        """Parse the rest of an object after the name: the arguments, and nothing else.

        Args:
          nested: the object is inside another one, which contains nothing else.
        """
        text = self._text
        yield from text.expect(",")
        key = yield from text.string()
        yield from text.expect(":")
        if key not in ARGUMENTS or (yield from text.peek()) != "{":
            raise NotACall
        self._start_call(name)
        yield from text.value(self._emit_arguments)
        yield from text.expect("}")
        if nested:
            yield from text.expect("}")
        self._end_call()

    def _wrapped(self) -> ParseSteps:
        """Parse the content of `<tool_call>`: JSON, a function, or a name with argument tags."""
        first = yield from self._text.peek()
        self.certain = first in "{[<"
        match first:
            case "{":
                yield from self._json()
            case "<":
                tags = ("<function=", "<tool_call>", "</tool_call>")
                self.empty = (yield from self._text.one_of(*tags, take=False)) != tags[0]
                yield from self._text.expect(tags[0])
                yield from self._function("</function>", "</tool_call>")
            case _:
                yield from self._argument_tags()

    def _argument_tags(self) -> ParseSteps:
        """Parse `NAME`, pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`."""
        text = self._text
        name = yield from text.before("<`" + string.whitespace)
        tag = yield from text.one_of("<arg_key>", "</tool_call>")
        self._start_call(name)
        lead = "{"
        while tag == "<arg_key>":
            key = (yield from text.until("</arg_key>")).strip()
            yield from text.expect("<arg_value>")
            raw = yield from text.until("</arg_value>")
            self._emit_parameter(lead, name, key, raw)
            lead = ", "
            tag = yield from text.one_of("<arg_key>", "</tool_call>")
        self._emit_arguments("{}" if lead == "{" else "}")
        self._end_call()

    def _function(self, *ends: str) -> ParseSteps:
        """Parse `NAME>` and parameter blocks, or `NAME(key=value, ...)`, and one of the ends."""
        text = self._text
        yield from text.peek()
        name = yield from text.before(">(<`" + string.whitespace)
        if (yield from text.one_of(">", "(")) == ">":
            if name not in self._tools:  # it may be text about such tags
                yield from text.one_of("<parameter=", *ends, take=False)
            self._start_call(name)
            yield from self._parameters(name, ends)
            return
        yield from self._pairs(name, "=", ")")
        yield from text.one_of(*ends, ">")
        self._end_call()

    def _named_tag(self, tag: str) -> ParseSteps:
        """Parse a tool's name as a tag, parameter blocks, and the closing tag."""
        yield from self._text.expect(tag)
        yield from self._text.one_of("<parameter=", take=False)
        name = tag[1:-1]
        self._start_call(name)
        yield from self._parameters(name, ("</function>", f"</{name}>"))

    def _parameters(self, name: str, ends: tuple[str, ...]) -> ParseSteps:
        """Parse parameter blocks, and one of the ends."""
        text = self._text
        parsed: list[str] = []
        while (yield from text.one_of("<parameter=", *ends)) == "<parameter=":
            parsed.append((yield from text.until(">")).strip())
            raw = yield from self._parameter(self._tools.get(name), parsed, ends)
            self._emit_parameter("{" if len(parsed) == 1 else ", ", name, parsed[-1], raw)
        self._emit_arguments("}" if parsed else "{}")
        self._end_call()

    def _parameter(
        self, tool: Tool | None, parsed: list[str], ends: tuple[str, ...]
    ) -> Generator[None, None, str]:
        """Parse a parameter's value, whose closing tag may be missing (see `implied_end`)."""
        text = self._text
        start = 0
        while True:
            buffer = text.buffer
            closed = buffer.find("</parameter>", start)
            at = malformed_calls.implied_end(
                buffer, start, tool, parsed, ends, ended=text.ended, closed=closed
            )
            if at is not None:
                return text.take(at)
            if closed >= 0:
                return (yield from text.until("</parameter>"))
            start = malformed_calls.rescan_from(buffer, start)
            yield from text.more()

    def _gemma(self) -> ParseSteps:
        """Parse `call:NAME{key:value,...}`."""
        yield from self._text.expect("call:")
        name = (yield from self._text.before("{<")).strip()
        yield from self._text.expect("{")
        yield from self._pairs(name, ":", "}")
        self._end_call()

    def _verb(self) -> ParseSteps:
        """Parse the same without tags; the tool must be declared."""
        text = self._text
        yield from text.expect(malformed_calls.CALL_PREFIX)
        name = (yield from text.word()).rpartition(":")[2]
        if name not in self._tools:
            raise NotACall
        yield from text.expect("{")
        yield from self._pairs(name, ":", "}")
        self._end_call()

    def _pairs(self, name: str, between: str, end: str) -> ParseSteps:
        """Parse keys and values in Gemma's notation, and the end."""
        text = self._text
        tool = self._tools.get(name)
        lead = "{"
        while (yield from text.peek()) != end:
            key = yield from text.key(between)
            if lead == "{":  # without a key, it may be text
                self._start_call(name)
            known = functools.partial(typed_value, tool=tool, parameter=key)
            value = yield from text.gemma_value(
                end, known if kinds_of(tool, key) else bare_word_value
            )
            self._emit_arguments(f"{lead}{_json(key)}: {_json(value)}")
            lead = ", "
            if (yield from text.peek()) == ",":
                yield from text.character()
        yield from text.character()
        if lead == "{":
            self._start_call(name)
        self._emit_arguments("{}" if lead == "{" else "}")

    # -- events -------------------------------------------------------------------------------

    def _reset(self, *, certain: bool) -> None:
        self.begun = False
        self.certain = certain
        self.empty = False
        self._pending = None

    def _start_call(self, name: str) -> None:
        """Emit the start of a call; raises NotACall if no tool can have this name."""
        self.certain = True
        if name not in self._tools:
            if not (self._allow_undeclared and NAME.fullmatch(name)):
                raise NotACall
            self._pending = []
        self._emit(ToolCallStart(self.count, name))

    def _emit(self, event: Event) -> None:
        if self._pending is not None:
            self._pending.append(event)
            return
        self._emit_event(event)
        if not self.begun:
            self.count += 1
        self.begun = True

    def _emit_arguments(self, text: str) -> None:
        if text:  # lone surrogates cannot be sent, and become JSON escapes
            text = text.encode("utf-8", "backslashreplace").decode()
            index = self.count - 1 if self.begun else self.count
            self._emit(ToolCallDelta(index, text))

    def _emit_parameter(self, lead: str, name: str, key: str, raw: str) -> None:
        """Emit a parameter that was written as text; a newline on each side is markup."""
        raw = raw.removeprefix("\n").removesuffix("\n")
        self._emit_arguments(
            f"{lead}{_json(key)}: {_json(typed_value(raw, self._tools.get(name), key))}"
        )

    def _end_call(self) -> None:
        if (held := self._pending) is not None:
            self._pending = None
            self.undeclared += [event.name for event in held if isinstance(event, ToolCallStart)]
            for event in joined(held):
                self._emit(event)
        self._emit(ToolCallEnd(self.count - 1))


def _ignore(_: str) -> None:
    pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
