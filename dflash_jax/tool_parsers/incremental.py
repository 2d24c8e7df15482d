"""Text that is still arriving, and readers of words and values in it.

Readers are generators: they run until they need text that has not come yet, and yield.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

from dflash_jax.tool_parsers.gemma4 import QUOTE
from dflash_jax.tool_parsers.stops import overlap
from dflash_jax.tool_parsers.tool_schema import parse_json

ParseSteps = Generator[None, None, None]


NON_WORD = re.compile(r"[^\w.:-]")
MARKS = "\"'`"
MAX_NESTING = 64  # lists and objects in each other


def bare_word_value(word: str) -> Any:
    """What a bare word means as JSON, if it is any."""
    return parse_json(word, word)


class EndOfOutput(Exception):
    """The output ended where a reader needs more."""


class NotACall(Exception):
    """What was begun like a call is none."""


class TextBuffer:
    """Text that is still arriving. Its generators yield while they wait for more.

    Attributes:
      recorded: characters taken since `keep_record`.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.recorded = 0
        self._recording: list[str] | None = None  # the pieces of what was taken

    def start_recording(self) -> None:
        """Records what is taken from now on."""
        self._recording, self.recorded = [], 0

    def stop_recording(self) -> str:
        """Ends the record, and returns it."""
        record = "".join(self._recording or ())
        self._recording, self.recorded = None, 0
        return record

    def rewind(self) -> None:
        """Puts what was recorded back in front, and ends the record."""
        self.buffer = self.stop_recording() + self.buffer

    def take(self, count: int) -> str:
        """The first characters, which are gone then."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        if self._recording is not None:
            self._recording.append(taken)
            self.recorded += len(taken)
        return taken

    def more(self) -> ParseSteps:
        """Waits for more text. Raises Ended if none will come."""
        if self.ended:
            raise EndOfOutput
        yield

    def scan(
        self, markers: Iterable[str], show: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Shows text as it becomes certain, up to a marker, which it takes and returns."""
        by_first: dict[str, list[str]] = {}
        for marker in markers:
            by_first.setdefault(marker[0], []).append(marker)
        while True:
            near = [m for c, group in by_first.items() if c in self.buffer for m in group]
            found = [(at, -len(m), m) for m in near if (at := self.buffer.find(m)) >= 0]
            if found:
                at, _, marker = min(found)
                show(self.take(at))
                self.take(len(marker))
                return marker
            keep = 0 if self.ended else max((overlap(self.buffer, m) for m in near), default=0)
            show(self.take(len(self.buffer) - keep))
            if self.ended:
                return None
            yield

    def until(self, marker: str) -> Generator[None, None, str]:
        """The text before a marker, which is taken too."""
        start = 0
        while (at := self.buffer.find(marker, start)) < 0:
            start = max(len(self.buffer) - len(marker) + 1, 0)
            yield from self.more()
        return self.take(at + len(marker))[:at]

    def before(self, ends: str) -> Generator[None, None, str]:
        """The text before the first of these characters, which stays."""
        start = 0
        while not (places := [at for c in ends if (at := self.buffer.find(c, start)) >= 0]):
            start = len(self.buffer)
            yield from self.more()
        return self.take(min(places))

    def word(self) -> Generator[None, None, str]:
        """Letters, digits and `_.:-` up to anything else."""
        at = 0
        while not (end := NON_WORD.search(self.buffer, at)):
            at = len(self.buffer)
            yield from self.more()
        return self.take(end.start())

    def peek(self) -> Generator[None, None, str]:
        """The next character that is not white space; it stays."""
        while not (rest := self.buffer.lstrip()):
            yield from self.more()
        self.take(len(self.buffer) - len(rest))
        return rest[0]

    def character(self) -> Generator[None, None, str]:
        """The next character that is not white space."""
        yield from self.peek()
        return self.take(1)

    def one_of(self, *words: str, take: bool = True) -> Generator[None, None, str]:
        """Takes one of these words after white space, or only looks for it."""
        while True:
            yield from self.peek()
            for word in words:
                if self.buffer.startswith(word):
                    return self.take(len(word)) if take else word
            if not any(word.startswith(self.buffer) for word in words):
                raise NotACall
            yield from self.more()

    def expect(self, word: str) -> ParseSteps:
        yield from self.one_of(word)

    def string(self) -> Generator[None, None, str]:
        """A JSON string."""
        if (yield from self.peek()) != '"':
            raise NotACall
        pieces: list[str] = []
        yield from self.value(pieces.append, unpack=False)
        try:
            return json.loads("".join(pieces))
        except json.JSONDecodeError:
            raise NotACall from None

    def value(self, show: Callable[[str], None], *, unpack: bool = True) -> ParseSteps:
        """Shows a JSON value's text.

        Args:
          unpack: an object may be written as a string, and nothing stands for an empty one; line
            ends and tabs within its texts become what JSON writes for them.
        """
        first = yield from self.peek()
        if first == '"' and unpack:
            text = yield from self.string()
            written = not text.strip() or text.lstrip().startswith("{")
            show((text.strip() or "{}") if written else json.dumps(text))
            return
        depth, quoted, at = 0, False, 0
        while True:
            while at >= len(self.buffer):
                if first in '{["':
                    piece = self.take(at)
                    at -= len(piece)
                    show(piece)
                yield from self.more()
            c = self.buffer[at]
            if quoted:
                if c == "\\":
                    at += 1
                elif c < " " and first == "{" and unpack:
                    show(self.take(at) + json.dumps(self.take(1))[1:-1])
                    at = 0
                    continue
                quoted = c != '"'
            elif c == '"':
                quoted = True
            elif c in "{[":
                depth += 1
            elif c in "}]":
                depth -= 1
            scalar = first not in '{["'
            if scalar and (depth < 0 or c in ",<" or c.isspace()):
                word = self.take(at)
                return show("{}" if unpack and word == "null" else word)
            at += 1
            if not scalar and depth == 0 and not quoted:
                return show(self.take(at))

    def key(self, sign: str) -> Generator[None, None, str]:
        """A name, which may be quoted, and the sign behind it."""
        first = yield from self.peek()
        if first == "<":
            yield from self.expect(QUOTE)
            name = yield from self.until(QUOTE)
        elif first in MARKS:
            name = yield from self._quoted()
        else:
            name = (yield from self.before(sign + "<>{}[],\n")).strip()
        yield from self.expect(sign)
        return name

    def gemma_value(
        self, end: str = "}", read: Callable[[str], Any] = bare_word_value, depth: int = 0
    ) -> Generator[None, None, Any]:
        """A value in Gemma's notation; texts may stand in other quotes as well.

        Args:
          end: what ends a bare word, besides a comma.
          read: what a bare word means.
        """
        first = yield from self.peek()
        if first == "<":
            yield from self.expect(QUOTE)
            return (yield from self.until(QUOTE))
        if first in MARKS:
            return (yield from self._quoted())
        if first in "{[":
            if depth > MAX_NESTING:
                raise NotACall
            yield from self.character()
            items: dict[str, Any] = {}
            while (yield from self.peek()) not in "}]":
                key = str(len(items)) if first == "[" else (yield from self.key(":"))
                items[key] = yield from self.gemma_value("}]", depth=depth + 1)
                if (yield from self.peek()) == ",":
                    yield from self.character()
            yield from self.character()
            return list(items.values()) if first == "[" else items
        return read((yield from self.before("," + end)).strip())

    def _quoted(self) -> Generator[None, None, str]:
        """A text between two marks of one kind; escapes are JSON's."""
        mark = yield from self.character()
        end = 0
        while True:
            end = self.buffer.find(mark, end)
            if end >= 0 and not escaped(self.buffer, end):
                break
            if end < 0:
                end = len(self.buffer)
                yield from self.more()
            else:
                end += 1
        raw = self.take(end + 1)[:-1]
        if mark != '"':
            raw = raw.replace(f"\\{mark}", mark).replace('"', '\\"')
        try:
            return json.loads(f'"{raw}"', strict=False)
        except json.JSONDecodeError:
            return raw


def escaped(text: str, at: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
