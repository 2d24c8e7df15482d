"""Equal tool calls in a row. A loop: no result of a call is known before the turn ends."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_jax.engine.recovery.words import Ids, Words
from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.events import ToolCallDelta, ToolCallEnd, ToolCallStart
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import Syntax

KIND = "repeated_calls"
MOST_TRIED = 64  # times that a call is parsed before it has to have doubled
LOOK_BACK = 24  # ids whose text shows whether a call has just ended


class Called(NamedTuple):
    """The calls of an output so far.

    Attributes:
      read: output ids that were read; what follows them begins outside of calls.
      thinking: whether it begins inside a thought; None before the first call.
      last: name and arguments of the last call.
      times: how many equal calls in a row the last one completes.
      first: output ids up to the end of the first of those.
      tried: how often a marker since `read` turned out to end no call, as within its arguments.
      length: ids since `read` when that happened last.
    """

    read: int = 0
    thinking: bool | None = None
    last: tuple[str, str] | None = None
    times: int = 0
    first: int = 0
    tried: int = 0
    length: int = 0


UNCALLED = Called()


def closes(syntax: Syntax) -> tuple[str, ...]:
    """Return the texts that end a call, in a family's form or in another's that is read as well."""
    return tuple(dict.fromkeys((*syntax.closes, *malformed_calls.CLOSES)))


def may_end(token: int, words: Words) -> bool:
    """Whether a token can be the last of a call."""
    if not (words.syntax and words.tools):
        return False
    if words.call_ends is not None:
        return token in words.call_ends
    text = words.text((token,))
    return any(close[-1] in text for close in closes(words.syntax))


def after(before: Called, since: Callable[[int], Ids], words: Words) -> Called:
    """Return the calls of an output whose last token may have ended one.

    Each call is parsed once, when it has ended, so the cost grows with the output alone. Where its
    arguments are full of closing markers, it is parsed again only when it has doubled.

    Args:
      since: gives the output from an id on.
    """
    assert words.syntax is not None
    ids = since(before.read)
    ending = words.text(ids[-LOOK_BACK:])
    if not any(close in ending[-len(close) - 4 :] for close in closes(words.syntax)):
        return before
    if before.tried >= MOST_TRIED and len(ids) < 2 * before.length:
        return before
    thinking = words.inside_thought if before.thinking is None else before.thinking
    parser = OutputParser(words.syntax, words.tools, thinking=thinking)
    events = parser.push(words.text(ids))
    if parser.calling or parser.waiting:  # the end belongs to an argument, or is no end yet
        return before._replace(tried=before.tried + 1, length=len(ids))
    place = before.read + len(ids)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    found = before._replace(read=place, thinking=parser.thinking, tried=0, length=0)
    for event in events:
        match event:
            case ToolCallStart(index, name):
                names[index], arguments[index] = name, ""
            case ToolCallDelta(index, text):
                arguments[index] += text
            case ToolCallEnd(index):
                call = (names[index], _canonical(arguments[index]))
                if call == found.last:
                    found = found._replace(times=found.times + 1)
                else:
                    found = found._replace(last=call, times=1, first=place)
    return found


def _canonical(arguments: str) -> str:
    """Arguments as JSON text that equal ones share."""
    try:
        value: Any = json.loads(arguments or "{}")
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
