"""Incremental parsing of words and values from streamed text, and search for stop strings.

Parsers are generators that yield when they need text that has not arrived yet.
"""

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from dflash_jax.tool_parsers.families import QUOTE
from dflash_jax.tool_parsers.tool_schema import parse_json

# Search for stop strings in streamed text, which never emits part of a match.
#
# The search is one Aho-Corasick automaton over all stop strings: its cost per character does not
# depend on the number of strings.


@dataclasses.dataclass(frozen=True)
class Automaton:
    """An Aho-Corasick automaton. A state is a prefix of some string; state 0 is the empty one.

    Attributes:
      next: by state, the states of the prefixes that are one character longer.
      fail: by state, the state of its longest proper suffix that is also a prefix.
      depth: by state, the length of its prefix.
      longest: by state, the length of the longest string that the prefix ends with; 0 if none.
    """

    next: tuple[dict[str, int], ...]
    fail: tuple[int, ...]
    depth: tuple[int, ...]
    longest: tuple[int, ...]

    def step(self, state: int, character: str) -> int:
        """Return the state of the longest suffix, after one more character, that is a prefix."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


@functools.lru_cache(maxsize=64)
def automaton(texts: tuple[str, ...]) -> Automaton:
    """Return the automaton of these strings, none of which is empty."""
    following: list[dict[str, int]] = [{}]
    fail = [0]
    depth = [0]
    longest = [0]
    for text in texts:
        state = 0
        for character in text:
            if character not in following[state]:
                following[state][character] = len(following)
                following.append({})
                fail.append(0)
                depth.append(depth[state] + 1)
                longest.append(0)
            state = following[state][character]
        longest[state] = len(text)
    waiting = collections.deque(following[0].values())
    while waiting:  # breadth first, so that shorter suffixes are complete
        state = waiting.popleft()
        longest[state] = longest[state] or longest[fail[state]]
        for character, child in following[state].items():
            suffix = fail[state]
            while suffix and character not in following[suffix]:
                suffix = fail[suffix]
            fail[child] = following[suffix].get(character, 0)
            waiting.append(child)
    return Automaton(tuple(following), tuple(fail), tuple(depth), tuple(longest))


class Stops:
    """Searches for stop strings, and holds back text that may be the start of one.

    Attributes:
      held: text that was not returned: a possible start of a stop string, or from a complete one
        on.
      found: the stop string that was found; no later text is returned.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._texts = tuple(texts)
        self._state = 0  # state of the automaton after `held`
        self.held = ""
        self.found: str | None = None

    def push(self, new: str) -> str:
        """Return the text that can no longer become part of a stop string."""
        if not self._texts:
            return new
        if self.found is not None:
            return ""
        strings = automaton(self._texts)
        state = self._state
        pending = self.held + new
        # Of all matches the one that starts first, and the shorter of two that start there.
        start = -1
        length = -1
        for end, character in enumerate(new, len(self.held) + 1):
            state = strings.step(state, character)
            if (size := strings.longest[state]) and (start < 0 or end - size < start):
                start = end - size
                length = size
        self._state = state
        if start >= 0:
            self.found = pending[start : start + length]
            self.held = pending[start:]
            return pending[:start]
        certain = len(pending) - strings.depth[state]
        self.held = pending[certain:]
        return pending[:certain]

    def flush(self, markup: str = "") -> str:
        """Return the held text, since markup or the end follows; the search starts over.

        Args:
          markup: hidden text that follows; a stop string may end with it.
        """
        if self.found is not None:
            return ""
        held = self.held
        pending = held + markup
        self._state = 0
        texts = [text for text in self._texts if markup and text.endswith(markup)]
        matches = [(pending.find(text), text) for text in texts if text in pending]
        at = len(pending)
        if matches:
            at, self.found = min(matches)
        self.held = pending[at:]
        return held[:at]


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


ParseSteps = Generator[None, None, None]


NON_WORD = re.compile(r"[^\w.:-]")
MARKS = "\"'`"
MAX_NESTING = 64  # lists and objects inside each other


def bare_word_value(word: str) -> Any:
    """Return the JSON value of a word, or the word itself if it is not JSON."""
    return parse_json(word, word)


class EndOfOutput(Exception):
    """The output ended where a parser needs more text."""


class NotACall(Exception):
    """The text that started like a call is not one."""


class TextBuffer:
    """Streamed text that was not parsed yet. Its generators yield to wait for more.

    All generators raise `EndOfOutput` if the output ends before they are done. Those that expect
    something in particular raise `NotACall` on other text.

    Attributes:
      buffer: the text that has arrived and was not taken.
      ended: no more text will arrive.
      recorded: number of characters taken since `start_recording`.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.recorded = 0
        self._recording: list[str] | None = None  # pieces that were taken

    def start_recording(self) -> None:
        """Record the text that is taken from now on."""
        self._recording = []
        self.recorded = 0

    def stop_recording(self) -> str:
        """Stop recording, and return the recorded text."""
        record = "".join(self._recording or ())
        self._recording = None
        self.recorded = 0
        return record

    def rewind(self) -> None:
        """Stop recording, and put the recorded text back."""
        self.buffer = self.stop_recording() + self.buffer

    def take(self, count: int) -> str:
        """Remove and return the first characters."""
        taken = self.buffer[:count]
        self.buffer = self.buffer[count:]
        if self._recording is not None:
            self._recording.append(taken)
            self.recorded += len(taken)
        return taken

    def more(self) -> ParseSteps:
        """Wait for more text."""
        if self.ended:
            raise EndOfOutput
        yield

    def scan(
        self, markers: Iterable[str], show: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Pass text to `show` up to a marker, which is taken and returned; None at the end.

        Text that may be the start of a marker is held back.
        """
        by_first: dict[str, list[str]] = {}
        for marker in markers:
            by_first.setdefault(marker[0], []).append(marker)
        while True:
            near: list[str] = []
            for character, group in by_first.items():
                if character in self.buffer:
                    near += group
            matches = [(at, -len(m), m) for m in near if (at := self.buffer.find(m)) >= 0]
            if matches:
                at, _, marker = min(matches)
                show(self.take(at))
                self.take(len(marker))
                return marker
            keep = 0 if self.ended else max((overlap(self.buffer, m) for m in near), default=0)
            show(self.take(len(self.buffer) - keep))
            if self.ended:
                return None
            yield

    def until(self, marker: str) -> Generator[None, None, str]:
        """Take text up to and including a marker; return it without the marker."""
        start = 0
        while (at := self.buffer.find(marker, start)) < 0:
            start = max(len(self.buffer) - len(marker) + 1, 0)
            yield from self.more()
        return self.take(at + len(marker))[:at]

    def before(self, ends: str) -> Generator[None, None, str]:
        """Take and return the text before the first of these characters."""
        start = 0
        while not (places := [at for c in ends if (at := self.buffer.find(c, start)) >= 0]):
            start = len(self.buffer)
            yield from self.more()
        return self.take(min(places))

    def word(self) -> Generator[None, None, str]:
        """Take and return letters, digits and `_.:-`."""
        at = 0
        while not (end := NON_WORD.search(self.buffer, at)):
            at = len(self.buffer)
            yield from self.more()
        return self.take(end.start())

    def peek(self) -> Generator[None, None, str]:
        """Skip white space, and return the next character without taking it."""
        while not (rest := self.buffer.lstrip()):
            yield from self.more()
        self.take(len(self.buffer) - len(rest))
        return rest[0]

    def character(self) -> Generator[None, None, str]:
        """Skip white space, and take and return the next character."""
        yield from self.peek()
        return self.take(1)

    def one_of(self, *words: str, take: bool = True) -> Generator[None, None, str]:
        """Skip white space, and return which of these words follows.

        Args:
          take: also take the word.
        """
        while True:
            yield from self.peek()
            for word in words:
                if self.buffer.startswith(word):
                    return self.take(len(word)) if take else word
            if not any(word.startswith(self.buffer) for word in words):
                raise NotACall
            yield from self.more()

    def expect(self, word: str) -> ParseSteps:
        """Skip white space, and take this word."""
        yield from self.one_of(word)

    def string(self) -> Generator[None, None, str]:
        """Take a JSON string, and return its value."""
        if (yield from self.peek()) != '"':
            raise NotACall
        pieces: list[str] = []
        yield from self.value(pieces.append, unpack=False)
        try:
            return json.loads("".join(pieces))
        except json.JSONDecodeError:
            raise NotACall from None

    def value(self, show: Callable[[str], None], *, unpack: bool = True) -> ParseSteps:
        """Take a JSON value, and pass its text to `show` as it arrives.

        Args:
          unpack: repair arguments: an object may be written as a string, an empty string or null
            becomes `{}`, and control characters in strings are escaped.
        """
        first = yield from self.peek()
        if first == '"' and unpack:
            text = yield from self.string()
            written = not text.strip() or text.lstrip().startswith("{")
            show((text.strip() or "{}") if written else json.dumps(text))
            return
        depth = 0
        quoted = False
        at = 0
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
        """Take a name, which may be quoted, and the sign after it; return the name."""
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
        """Take a value in Gemma's notation, with any kind of quotes, and return it.

        Args:
          end: characters that end a bare word, in addition to a comma.
          read: converts a bare word to its value.
          depth: current nesting.
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
        """Take a quoted string with JSON's escapes, and return its value."""
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
    """Return whether an odd number of backslashes precedes a position."""
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
