"""Find equal tool calls in a row, and too many calls: loops, as results follow only the turn."""

import json
from collections.abc import Callable
from typing import NamedTuple

from dflash_jax.engine.state_machine.settings import Recovery
from dflash_jax.engine.state_machine.words import Ids, Words
from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.calls import ToolCallDelta, ToolCallEnd, ToolCallStart
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import Syntax

KIND, TOO_MANY = "repeated_calls", "max_calls"
MOST_TRIED = 64  # failed attempts to parse a call, after which it must double first
LOOK_BACK = 24  # ids whose text shows whether a call has just ended


class Called(NamedTuple):
    """The calls of an output so far."""

    read: int = 0  # output ids that were parsed; the rest begins outside calls
    thinking: bool | None = None  # the rest begins inside a thought; None before the first call
    last: tuple[str, str] | None = None  # name and arguments of the last call
    total: int = 0  # number of calls
    times: int = 0  # number of equal calls in a row that end with the last one
    first: int = 0  # output ids up to the end of the first of those
    tried: int = 0  # markers after `read` that ended no call, such as those within arguments
    length: int = 0  # ids after `read` at the last of those

    def judge(self, recovery: Recovery) -> str | None:
        """Return why the calls so far end the output, or None."""
        if recovery.repeated_calls and self.times >= recovery.repeated_calls:
            return KIND
        return TOO_MANY if recovery.max_calls and self.total >= recovery.max_calls else None


def closes(syntax: Syntax) -> tuple[str, ...]:
    """Return the texts that end a call, in all syntaxes that are parsed for a family."""
    return tuple(dict.fromkeys((*syntax.closes, *malformed_calls.CLOSES)))


def may_end(token: int, words: Words) -> bool:
    """Return whether a token can be the last of a call."""
    if not (words.syntax and words.tools):
        return False
    if words.call_ends is not None:
        return token in words.call_ends
    text = words.text((token,))
    return any(close[-1] in text for close in closes(words.syntax))


def after(before: Called, since: Callable[[int], Ids], words: Words) -> Called:
    """Return the calls of an output whose last token may have ended one.

    Each call is parsed once, at its end, so the cost is linear in the output. A call whose
    arguments are full of closing markers is parsed again only when its length has doubled.

    Args:
      since: returns the output from an index on.
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
    if parser.calling or parser.waiting:  # the marker is part of an argument, or incomplete
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
                if call != found.last:
                    found = found._replace(last=call, times=0, first=place)
                found = found._replace(times=found.times + 1, total=found.total + 1)
    return found


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
