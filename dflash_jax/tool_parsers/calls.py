"""Reads tool calls, each in its family's form, out of text that is still arriving."""

import functools
import json
import re
import string
from collections.abc import Callable, Generator, Mapping
from typing import Any

from dflash_jax.tool_parsers import malformed_calls as slips
from dflash_jax.tool_parsers.events import Arguments, CallBegun, CallDone, Event, joined
from dflash_jax.tool_parsers.incremental import Arriving, NoCall, Reader, as_written
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import Tool, kinds_of, typed

ARGUMENTS = ("arguments", "parameters")
NAME = re.compile(r"[\w.:/-]{1,128}")  # of an undeclared tool


class CallReader:
    """Passes on the events of calls as they are read.

    A call of a declared tool is passed on while it is written. One of an undeclared tool is passed
    on once it is complete, as until then it may be text.

    Attributes:
      count: calls that were passed on.
      begun: events of the call that is being read, or was read last, were passed on.
      certain: what was read can only have been meant as a call.
      empty: it was an opening tag without anything in it.
      undeclared: names of undeclared tools that were called, in order.

    Args:
      tell: takes the events.
      allow_undeclared: whether tools may be called that were not declared.
    """

    def __init__(
        self, syntax: Syntax | None, tools: Mapping[str, Tool], text: Arriving,
        tell: Callable[[Event], None], *, allow_undeclared: bool = True,
    ):  # fmt: skip
        self._syntax, self._tools, self._text, self._tell = syntax, tools, text, tell
        self._allow_undeclared = allow_undeclared
        self._held: list[Event] | None = None  # of a call of an undeclared tool
        self.count = 0
        self.begun = self.certain = self.empty = False
        self.undeclared: list[str] = []

    def read(self, marker: str, *, bare: bool = False) -> Reader:
        """A call that begins with the marker, which was taken unless it is bare.

        Raises:
          NoCall: it is none.
          Ended: the output ended inside it.
        """
        self._reset(certain=not bare and marker not in slips.WORDS)
        match marker:
            case "<tool_call>":
                return self._wrapped()
            case "<function=":
                return self._function("</function>")
            case "<|tool_call>":
                return self._gemma()
            case slips.VERB:
                return self._verb()
            case tag if tag.startswith("<") and tag[1:-1] in self._tools:
                return self._named_tag(tag)
            case found if found in slips.BARE and not self._is_native(found):
                return self._bare()
        return self._json(bare=bare)

    def _is_native(self, marker: str) -> bool:
        return self._syntax is not None and marker in self._syntax.opens

    def whole(self, tool: Tool) -> Reader:
        """The arguments of the only tool, where they are all of the output.

        Raises:
          NoCall, Ended: there is more, or something else; nothing was told.
        """
        text = self._text
        self._reset(certain=False)
        yield from text.expect("{")
        if (yield from text.string()) not in tool.properties:
            raise NoCall
        text.put_back()
        text.keep_record()
        pieces: list[str] = []
        yield from text.value(pieces.append, unpack=False)
        while not text.buffer.strip() and not text.ended:
            yield
        if text.buffer.strip() or not slips.fits(tool, "".join(pieces)):
            raise NoCall
        text.take(len(text.buffer))
        self._begin(tool.name)
        self._give("".join(pieces).strip())
        self._done()

    def harmony(self, name: str) -> Reader:
        """A call whose header named the tool.

        Raises:
          NoCall: what follows is no object; it may be missing, though.
        """
        self._reset(certain=True)
        if (yield from self._text.peek()) in '{"':
            self._begin(name)
            yield from self._text.value(self._give)
        else:
            yield from self._text.one_of("<|", "null", take=False)
            self._begin(name)
            self._give("{}")
        self._done()

    # -- forms --------------------------------------------------------------------------------

    def _json(self, *, bare: bool = False) -> Reader:
        """An object with `name`, and `arguments` or `parameters`.

        Args:
          bare: no tags surround it, so that other objects look alike. Where no tool of that name
            is declared, its arguments have to follow, and nothing else.
        """
        text = self._text
        held = ""  # arguments that came before the name
        named = given = False
        yield from text.expect("{")
        while True:
            key = yield from text.string()
            yield from text.expect(":")
            if key == "name" and not named:
                named = True
                name = yield from text.string()
                if bare and name not in self._tools:
                    yield from self._arguments_alone(name)
                    return
                self._begin(name)
                self._give(held)
            elif key in ARGUMENTS and not given:
                pieces: list[str] = []
                given = True
                yield from text.value(self._give if named else pieces.append)
                held += "".join(pieces)
            else:
                yield from text.value(_ignore)
            if (following := (yield from text.peek())) in ",}":
                yield from text.character()
            if following != ",":  # where a brace was forgotten, markup follows, which stays
                break
        if not named:
            raise NoCall
        if not given:
            self._give("{}")
        self._done()

    def _bare(self) -> Reader:
        """An object without tags: a declared name, then its arguments."""
        text = self._text
        yield from text.expect("{")
        yield from text.string()
        yield from text.expect(":")
        name = yield from text.string()
        if name not in self._tools:
            raise NoCall
        yield from self._arguments_alone(name)

    def _arguments_alone(self, name: str) -> Reader:
        """The rest of an object behind its name: the arguments and nothing else."""
        text = self._text
        yield from text.expect(",")
        key = yield from text.string()
        yield from text.expect(":")
        if key not in ARGUMENTS or (yield from text.peek()) != "{":
            raise NoCall
        self._begin(name)
        yield from text.value(self._give)
        yield from text.expect("}")
        self._done()

    def _wrapped(self) -> Reader:
        """What stands in `<tool_call>`: JSON, a function, or a name with argument tags."""
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

    def _argument_tags(self) -> Reader:
        """`NAME`, pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`."""
        text = self._text
        name = yield from text.before("<`" + string.whitespace)
        tag = yield from text.one_of("<arg_key>", "</tool_call>")
        self._begin(name)
        lead = "{"
        while tag == "<arg_key>":
            key = (yield from text.until("</arg_key>")).strip()
            yield from text.expect("<arg_value>")
            raw = yield from text.until("</arg_value>")
            self._give_typed(lead, name, key, raw)
            lead = ", "
            tag = yield from text.one_of("<arg_key>", "</tool_call>")
        self._give("{}" if lead == "{" else "}")
        self._done()

    def _function(self, *ends: str) -> Reader:
        """`NAME>` and parameter blocks, or `NAME(key=value, ...)`, and one of the ends."""
        text = self._text
        yield from text.peek()
        name = yield from text.before(">(<`" + string.whitespace)
        if (yield from text.one_of(">", "(")) == ">":
            if name not in self._tools:  # then it may be text about such tags
                yield from text.one_of("<parameter=", *ends, take=False)
            self._begin(name)
            yield from self._parameters(name, ends)
            return
        yield from self._pairs(name, "=", ")")
        yield from text.one_of(*ends, ">")
        self._done()

    def _named_tag(self, tag: str) -> Reader:
        """A tool's name as a tag, with parameter blocks in it."""
        yield from self._text.expect(tag)
        yield from self._text.one_of("<parameter=", take=False)
        name = tag[1:-1]
        self._begin(name)
        yield from self._parameters(name, ("</function>", f"</{name}>"))

    def _parameters(self, name: str, ends: tuple[str, ...]) -> Reader:
        """Parameter blocks, and one of the ends."""
        text = self._text
        given: list[str] = []
        while (yield from text.one_of("<parameter=", *ends)) == "<parameter=":
            given.append((yield from text.until(">")).strip())
            raw = yield from self._parameter(self._tools.get(name), given, ends)
            self._give_typed("{" if len(given) == 1 else ", ", name, given[-1], raw)
        self._give("}" if given else "{}")
        self._done()

    def _parameter(
        self, tool: Tool | None, given: list[str], ends: tuple[str, ...]
    ) -> Generator[None, None, str]:
        """A parameter's value, whose closing tag may be missing (`slips.unclosed` says where)."""
        text, start = self._text, 0
        while True:
            buffer = text.buffer
            closed = buffer.find("</parameter>", start)
            at = slips.unclosed(buffer, start, tool, given, ends, ended=text.ended, closed=closed)
            if at is not None:
                return text.take(at)
            if closed >= 0:
                return (yield from text.until("</parameter>"))
            start = slips.settled(buffer, start)
            yield from text.more()

    def _gemma(self) -> Reader:
        """`call:NAME{key:value,...}`."""
        yield from self._text.expect("call:")
        name = (yield from self._text.before("{<")).strip()
        yield from self._text.expect("{")
        yield from self._pairs(name, ":", "}")
        self._done()

    def _verb(self) -> Reader:
        """The same without tags: then the name has to be declared."""
        text = self._text
        yield from text.expect(slips.VERB)
        name = (yield from text.word()).rpartition(":")[2]
        if name not in self._tools:
            raise NoCall
        yield from text.expect("{")
        yield from self._pairs(name, ":", "}")
        self._done()

    def _pairs(self, name: str, between: str, end: str) -> Reader:
        """Keys and values in Gemma's notation, and the end."""
        text, tool = self._text, self._tools.get(name)
        lead = "{"
        while (yield from text.peek()) != end:
            key = yield from text.key(between)
            if lead == "{":  # before, it may be text
                self._begin(name)
            known = functools.partial(typed, tool=tool, parameter=key)
            value = yield from text.gemma_value(end, known if kinds_of(tool, key) else as_written)
            self._give(f"{lead}{_json(key)}: {_json(value)}")
            lead = ", "
            if (yield from text.peek()) == ",":
                yield from text.character()
        yield from text.character()
        if lead == "{":
            self._begin(name)
        self._give("{}" if lead == "{" else "}")

    # -- events -------------------------------------------------------------------------------

    def _reset(self, *, certain: bool) -> None:
        self.begun, self.certain, self.empty, self._held = False, certain, False, None

    def _begin(self, name: str) -> None:
        """The name is complete. Raises NoCall for an undeclared one that no tool can have."""
        self.certain = True
        if name not in self._tools:
            if not (self._allow_undeclared and NAME.fullmatch(name)):
                raise NoCall
            self._held = []
        self._pass(CallBegun(self.count, name))

    def _pass(self, event: Event) -> None:
        if self._held is not None:
            self._held.append(event)
            return
        self._tell(event)
        self.count += not self.begun
        self.begun = True

    def _give(self, text: str) -> None:
        if text:  # halves of characters, which cannot be sent, as JSON's escapes
            text = text.encode("utf-8", "backslashreplace").decode()
            self._pass(Arguments(self.count - self.begun, text))

    def _give_typed(self, lead: str, name: str, key: str, raw: str) -> None:
        """A parameter that was written as text; a newline on each side is markup."""
        raw = raw.removeprefix("\n").removesuffix("\n")
        self._give(f"{lead}{_json(key)}: {_json(typed(raw, self._tools.get(name), key))}")

    def _done(self) -> None:
        if (held := self._held) is not None:
            self._held = None
            self.undeclared += [event.name for event in held if isinstance(event, CallBegun)]
            for event in joined(held):
                self._pass(event)
        self._pass(CallDone(self.count - 1))


def _ignore(_: str) -> None:
    pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
