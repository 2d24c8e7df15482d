"""Calls that are not written as their family writes them: where they begin, end and may stand.

Models slip into each other's forms. All are read whatever the family, but only as calls of
declared tools; what has no tags of its own is text unless it is a call beyond doubt.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.tool_schema import KINDS, Tool, kinds_of, parse_json

OPENS = ("<tool_call>", "<function=", "<tool_code>")
AMBIGUOUS_OPENS = ("<tool_call>", "<function=")  # of these, texts about tools may speak
CLOSES = ("</tool_call>", "</function>", "</tool_code>")
CALL_PREFIX = "call:"  # NAME{key: value}
BARE_OPENS = tuple(f'{{{space}"name"' for space in ("", " ", "\n", "\n  ", "\n    ", "\n\t"))
FENCE = "```"
LOOK_BACK = 80  # characters in which a line begins, if white space is all it has

NEXT_TAG = re.compile(r"(?:(?<=\n)|^)<parameter=(?P<name>[^<>\n]+)>|</[^<>\s]+>")
OPEN_TAIL = re.compile(r"</[^<>\s]+>\s*(?:<[^<>\n]*)?\Z|<[^<>\n]*\Z")  # tags that may yet be such
AFTER_CALL = ("</tool_call>", "<tool_call>", "<function=")  # what may follow a call


def untagged_openings(tools: Mapping[str, Tool], taken: Sequence[str]) -> tuple[str, ...]:
    """Beginnings of calls that may as well be text: a tool's name as a tag, JSON, a verb.

    Args:
      taken: markers that mean something else.
    """
    tags = (f"<{name}>" for name in tools)
    return (*BARE_OPENS, CALL_PREFIX, *(tag for tag in tags if tag not in taken))


class ShownText:
    """What was shown so far, as far as it tells whether an untagged call may begin behind it."""

    def __init__(self) -> None:
        self.blank = True  # nothing but white space
        self._fenced = False  # inside a block of code
        self._ticks = self._end = ""

    def add(self, text: str) -> None:
        self.blank = self.blank and not text.strip()
        *fences, ticks = (self._ticks + text).split(FENCE)
        self._fenced ^= len(fences) % 2 == 1
        self._ticks, self._end = ticks[-2:], (self._end + text)[-LOOK_BACK:]

    @property
    def within_object(self) -> bool:
        """Whether what follows is the value of a JSON object's key."""
        return re.search(r'"\s*:\s*\Z', self._end) is not None

    def allows(self, marker: str) -> bool:
        """Whether an untagged call may begin with this marker here."""
        if self._fenced:
            return False
        if marker in BARE_OPENS:
            return self._end.rstrip(" \t")[-1:] in ("", "\n")
        return marker != CALL_PREFIX or not re.search(r"[\w.:-]\Z", self._end)


def is_arguments_object(tool: Tool, text: str) -> bool:
    """Whether a text is an object of the tool's arguments and nothing else can be meant."""
    found = parse_json(text, None)
    if not (isinstance(found, dict) and found and found.keys() <= tool.properties.keys()):
        return False
    required = tool.parameters.get("required")
    if isinstance(required, list) and any(name not in [*found] for name in required):
        return False
    return all(is_a(value, kinds_of(tool, name)) for name, value in found.items())


def is_a(value: Any, kinds: Collection[str]) -> bool:
    """Whether a value is of one of these JSON types; any is where none is named."""
    if isinstance(value, bool):
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, KINDS.get(kind, object)) for kind in kinds)


def implied_end(
    buffer: str,
    start: int,
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
      start: nothing before it is any end (`settled`).
      closed: where its closing tag stands; -1 if none came yet.
    """
    names = set(tool.properties if tool else ()) - set(given)
    last = closed if closed >= 0 else len(buffer)
    for found in NEXT_TAG.finditer(buffer, start, last):
        if found[0] in ends:
            rest = buffer[found.end() :].lstrip()
            if rest.startswith(AFTER_CALL) if rest else ended:
                return found.start()
        elif found["name"] and found["name"].strip() in names:
            return found.start()
    if ended and closed < 0:
        return min((at for end in ends if (at := buffer.find(end)) >= 0), default=None)
    return None


def rescan_from(buffer: str, start: int) -> int:
    """From where a value has to be looked at again, once more of it came."""
    tail = OPEN_TAIL.search(buffer, start)
    return tail.start() if tail else len(buffer)
