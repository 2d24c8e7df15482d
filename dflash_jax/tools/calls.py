"""Reads tool calls, each in its family's form, out of text that is still arriving."""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from dflash_jax.tools.arriving import Arriving, NoCall, Reader
from dflash_jax.tools.declared import Tool, typed
from dflash_jax.tools.events import Arguments, CallBegun, CallDone, Event
from dflash_jax.tools.syntax import Syntax

NEXT = re.compile(r"(?:(?<=\n)|^)<parameter=(?P<name>[^<>\n]+)>|</[^<>\s]+>")
BEHIND = ("</tool_call>", "<tool_call>", "<function=")  # what may follow a call
UNTAGGED = '{"name"'  # begins a call that no tags surround


class CallReader:
    """Tells the events of calls; what names no declared tool is read and not told.

    Attributes:
      count: calls of declared tools that were begun.
    """

    def __init__(
        self, syntax: Syntax | None, tools: Mapping[str, Tool], text: Arriving,
        tell: Callable[[Event], None],
    ):  # fmt: skip
        self._syntax, self._tools, self._text, self._tell = syntax, tools, text, tell
        self._live = False  # the call being read is of a declared tool
        self.count = 0

    def read(self, marker: str) -> Reader:
        """A call behind the marker that begins it.

        Raises:
          NoCall: it is none.
          Ended: the output ended inside it.
        """
        assert self._syntax is not None
        self._live = False
        readers = {"hermes": self._json, "qwen_xml": self._xml, "gemma4": self._gemma}
        if marker == UNTAGGED:
            self._text.buffer = marker + self._text.buffer
        if marker == "<function=":
            return self._function("</function>")
        return readers.get(self._syntax.name, self._json)()

    def harmony(self, name: str) -> Reader:
        """A call whose header named the tool."""
        self._begin(name)
        yield from self._text.value(self._give)
        self._done()

    # -- forms --------------------------------------------------------------------------------

    def _json(self) -> Reader:
        """An object with `name`, and `arguments` or `parameters`."""
        text = self._text
        held = ""  # arguments that came before the name
        named = given = False
        yield from text.expect("{")
        while True:
            key = yield from text.string()
            yield from text.expect(":")
            if key == "name":
                named = True
                self._begin((yield from text.string()))
                self._give(held)
            elif key in ("arguments", "parameters") and not given:
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

    def _xml(self) -> Reader:
        yield from self._text.expect("<function=")
        yield from self._function("</function>", "</tool_call>")

    def _function(self, *ends: str) -> Reader:
        """`NAME>`, parameter blocks, and one of the ends."""
        text = self._text
        name = (yield from text.until(">")).strip()
        tool = self._tools.get(name)
        self._begin(name)
        given: list[str] = []
        while (yield from text.one_of("<parameter=", *ends)) == "<parameter=":
            given.append((yield from text.until(">")).strip())
            raw = yield from self._parameter(tool, given, ends)
            value = typed(raw.removeprefix("\n").removesuffix("\n"), tool, given[-1])
            lead = "{" if len(given) == 1 else ", "
            self._give(f"{lead}{_json(given[-1])}: {_json(value)}")
        self._give("}" if given else "{}")
        self._done()

    def _parameter(
        self, tool: Tool | None, given: list[str], ends: tuple[str, ...]
    ) -> Generator[None, None, str]:
        """A parameter's value, whose closing tag may be missing (`unclosed` says where)."""
        text = self._text
        while True:
            closed = text.buffer.find("</parameter>")
            at = unclosed(text.buffer, tool, given, ends, ended=text.ended, closed=closed)
            if at is not None:
                return text.take(at)
            if closed >= 0:
                return (yield from text.until("</parameter>"))
            yield from text.more()

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
            self._tell(CallBegun(self.count, name))
            self.count += 1

    def _give(self, text: str) -> None:
        if self._live and text:
            self._tell(Arguments(self.count - 1, text))

    def _done(self) -> None:
        if self._live:
            self._tell(CallDone(self.count - 1))
            self._live = False


def unclosed(
    buffer: str,
    tool: Tool | None,
    given: Sequence[str],
    ends: Sequence[str],
    *,
    ended: bool,
    closed: int,
) -> int | None:
    """Where a value ends that nothing closes; None where that is not known, or not so.

    Values may hold any text, such as markup. So the next parameter has to stand on a line of its
    own, be declared and not be given yet, and behind the call's end the output has to end or go
    on with markup. Where the output ended and nothing else closes the value, any end does.

    Args:
      closed: where its closing tag stands; -1 if none came yet.
    """
    known = tool.parameters.get("properties") if tool else None
    names = set(known or ()) - set(given)
    last = closed if closed >= 0 else len(buffer)
    for found in NEXT.finditer(buffer, 0, last):
        if found["name"] is None:
            rest = buffer[found.end() :].lstrip()
            sure = rest.startswith(BEHIND) if rest else ended
            if found[0] in ends and sure:
                return found.start()
        elif found["name"].strip() in names:
            return found.start()
    if ended and closed < 0:
        return min((at for end in ends if (at := buffer.find(end)) >= 0), default=None)
    return None


def _ignore(_: str) -> None:
    pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
