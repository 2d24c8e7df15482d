"""Reads tool calls, each in its family's form, out of text that is still arriving."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.tools.arriving import Arriving, NoCall, Reader
from dflash_jax.tools.declared import Tool, typed
from dflash_jax.tools.events import Arguments, CallBegun, CallDone, Event
from dflash_jax.tools.syntax import Syntax

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
            return self._function()
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
            self._tell(CallBegun(self.count, name))
            self.count += 1

    def _give(self, text: str) -> None:
        if self._live and text:
            self._tell(Arguments(self.count - 1, text))

    def _done(self) -> None:
        if self._live:
            self._tell(CallDone(self.count - 1))
            self._live = False


def _ignore(_: str) -> None:
    pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
