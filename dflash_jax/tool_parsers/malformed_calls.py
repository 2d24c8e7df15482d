"""Tool calls in another syntax than that of the model's family: where they start and end.

Models sometimes use other families' syntax. All of it is parsed, for declared tools only; text
without tags is parsed as a call only if it cannot be anything else.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.finite_schema import KINDS
from dflash_jax.tool_parsers.tool_schema import Tool, kinds_of, parse_json

OPENS = ("<tool_call>", "<function=", "<tool_code>")
AMBIGUOUS_OPENS = ("<tool_call>", "<function=")  # also appear in texts about tools
CLOSES = ("</tool_call>", "</function>", "</tool_code>")
CALL_PREFIX = "call:"  # NAME{key: value}
# The first key of a call that is a JSON object, with its value where that tells calls from answers.
FIRST_KEYS = ('"name"', '"type": "function"', '"type":"function"', '"function"')
BARE_OPENS = tuple(
    f"{{{space}{key}" for space in ("", " ", "\n", "\n  ", "\n    ", "\n\t") for key in FIRST_KEYS
)
FENCE = "```"
LOOK_BACK = 400  # characters of the shown text that are kept

NEXT_TAG = re.compile(r"(?:(?<=\n)|^)<parameter=(?P<name>[^<>\n]+)>|</[^<>\s]+>")
OPEN_TAIL = re.compile(r"</[^<>\s]+>\s*(?:<[^<>\n]*)?\Z|<[^<>\n]*\Z")  # incomplete tags
AFTER_CALL = ("</tool_call>", "<tool_call>", "<function=")  # markup that may follow a call


def untagged_openings(tools: Mapping[str, Tool], taken: Sequence[str]) -> tuple[str, ...]:
    """Return the starts of calls without tags: JSON, `call:`, and tool names as tags.

    Args:
      taken: markers with another meaning, which are left out.
    """
    tags = (f"<{name}>" for name in tools)
    return (*BARE_OPENS, CALL_PREFIX, *(tag for tag in tags if tag not in taken))


class ShownText:
    """The end of the shown text, which decides whether an untagged call may follow.

    Attributes:
      blank: only white space was shown.
      end: its last characters.
    """

    def __init__(self) -> None:
        self.blank = True
        self._fenced = False  # inside a fenced code block
        self._ticks = self.end = ""

    def add(self, text: str) -> None:
        """Append text."""
        self.blank = self.blank and not text.strip()
        *fences, ticks = (self._ticks + text).split(FENCE)
        if len(fences) % 2 == 1:
            self._fenced = not self._fenced
        self._ticks = ticks[-2:]
        self.end = (self.end + text)[-LOOK_BACK:]

    @property
    def within_object(self) -> bool:
        """Return whether the next text is the value of a key in a JSON object."""
        return re.search(r'"\s*:\s*\Z', self.end) is not None

    def allows(self, marker: str) -> bool:
        """Return whether an untagged call may start here with this marker."""
        if self._fenced:
            return False
        if marker == FENCE or marker in BARE_OPENS:
            return self.end.rstrip(" \t")[-1:] in ("", "\n")
        return marker != CALL_PREFIX or not re.search(r"[\w.:-]\Z", self.end)


def is_arguments_object(tool: Tool, text: str) -> bool:
    """Return whether a text is an object that matches the tool's parameters."""
    arguments = parse_json(text, None)
    if not isinstance(arguments, dict):
        return False
    named = tool.merged.fit(arguments) and arguments.keys() <= tool.properties.keys()
    return named and all(is_a(value, kinds_of(tool, name)) for name, value in arguments.items())


def are_valid_arguments(tool: Tool | None, text: str) -> bool:
    """Return whether a call's arguments are a JSON object with the tool's required keys.

    Args:
      tool: None for an undeclared tool, which requires no keys.
    """
    arguments = parse_json(text or "{}", None)
    return isinstance(arguments, dict) and (tool is None or tool.merged.fit(arguments))


def is_a(value: Any, kinds: Collection[str]) -> bool:
    """Return whether a value has one of these JSON types; an empty collection allows all."""
    if isinstance(value, bool):
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, KINDS.get(kind, object)) for kind in kinds)


def implied_end(
    buffer: str,
    start: int,
    tool: Tool | None,
    parsed: Sequence[str],
    ends: Sequence[str],
    *,
    ended: bool,
    closed: int,
) -> int | None:
    """Return where a parameter without a closing tag ends, or None if that is not certain.

    Values may contain any text, including markup. So a following parameter ends a value only if it
    is on its own line, declared, and not parsed yet; the end of the call ends it only if the output
    ends there or continues with markup. If the output has ended without a closing tag, the first
    end of a call ends the value.

    Args:
      buffer: text from the start of the value.
      start: where to start searching (`rescan_from`).
      parsed: parameters parsed so far, including this one.
      ends: texts that end the call.
      ended: the output is complete.
      closed: position of the closing tag; -1 if there is none yet.
    """
    names = set(tool.properties if tool else ()) - set(parsed)
    last = closed if closed >= 0 else len(buffer)
    for tag in NEXT_TAG.finditer(buffer, start, last):
        if tag[0] in ends:
            rest = buffer[tag.end() :].lstrip()
            if rest.startswith(AFTER_CALL) if rest else ended:
                return tag.start()
        elif tag["name"] and tag["name"].strip() in names:
            return tag.start()
    if ended and closed < 0:
        return min((at for end in ends if (at := buffer.find(end)) >= 0), default=None)
    return None


def rescan_from(buffer: str, start: int) -> int:
    """Return the position from which to search again after more text has arrived."""
    tail = OPEN_TAIL.search(buffer, start)
    return tail.start() if tail else len(buffer)
