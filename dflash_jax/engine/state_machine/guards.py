"""Rules that end outputs that loop.

The default rule for text is in `loops.py`. This file has the rule for tool calls, and the rules of
the original engines, which settings can select.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dflash_jax.engine.state_machine import loops
from dflash_jax.engine.state_machine.settings import Recovery
from dflash_jax.engine.state_machine.words import Ids, Words
from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.calls import calls_of
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import Syntax

# Equal tool calls in a row, and too many calls: loops, as results follow only the turn.

REPEATED_CALLS, TOO_MANY_CALLS = "repeated_calls", "max_calls"
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
            return REPEATED_CALLS
        return TOO_MANY_CALLS if recovery.max_calls and self.total >= recovery.max_calls else None


def call_closes(syntax: Syntax) -> tuple[str, ...]:
    """Return the texts that end a call, in all syntaxes that are parsed for a family."""
    return tuple(dict.fromkeys((*syntax.closes, *malformed_calls.CLOSES)))


def may_end_call(token: int, words: Words) -> bool:
    """Return whether a token can be the last of a call."""
    if not (words.syntax and words.tools):
        return False
    if words.call_ends is not None:
        return token in words.call_ends
    text = words.text((token,))
    return any(close[-1] in text for close in call_closes(words.syntax))


def called_after(before: Called, since: Callable[[int], Ids], words: Words) -> Called:
    """Return the calls of an output whose last token may have ended one.

    Each call is parsed once, at its end, so the cost is linear in the output. A call whose
    arguments are full of closing markers is parsed again only when its length has doubled.

    Args:
      since: returns the output from an index on.
    """
    assert words.syntax is not None
    ids = since(before.read)
    ending = words.text(ids[-LOOK_BACK:])
    if not any(close in ending[-len(close) - 4 :] for close in call_closes(words.syntax)):
        return before
    if before.tried >= MOST_TRIED and len(ids) < 2 * before.length:
        return before
    thinking = words.inside_thought if before.thinking is None else before.thinking
    parser = OutputParser(words.syntax, words.tools, thinking=thinking)
    events = parser.push(words.text(ids))
    if parser.calling or parser.waiting:  # the marker is part of an argument, or incomplete
        return before._replace(tried=before.tried + 1, length=len(ids))
    place = before.read + len(ids)
    found = before._replace(read=place, thinking=parser.thinking, tried=0, length=0)
    for name, arguments, ended in calls_of(events):
        if ended:
            call = (name, _canonical(arguments))
            if call != found.last:
                found = found._replace(last=call, times=0, first=place)
            found = found._replace(times=found.times + 1, total=found.total + 1)
    return found


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


LONGEST_UNIT, COPIES, KEPT = 8, 12, 3  # of a runaway loop
PERIODS = range(12, 81)  # of the watchdog
LEAST_REPEATED = 48


class LoopMemory(NamedTuple):
    """Facts about an output that the loop rules need for its next token."""

    seen: loops.Seen = loops.Seen()
    masked: str = ""  # the same with all numbers equal, see `loops.with_masked`
    called: Called = Called()

    def shortened(self, count: int) -> "LoopMemory":
        """Return the facts about the first `count` ids, as far as they are known."""
        return LoopMemory(called=self.called) if self.called.read <= count else NO_MEMORY


NO_MEMORY = LoopMemory()


class Guard:
    """Applies the loop rules to the tokens of a step, one by one.

    Args:
      memory, ids: of the output before the step.
    """

    def __init__(self, memory: LoopMemory, ids: Sequence[int], recovery: Recovery, words: Words):
        self._recovery, self._words = recovery, words
        (self._seen, seen), self._masked, self._called = memory
        self._tail: list[int] | None = None
        if recovery.repeats or recovery.runaway is True or recovery.watches:
            self._tail = list(ids[-max(recovery.repeats, 3 * PERIODS[-1]) :])
        self._count, self._keep = len(ids), 0
        if recovery.measures:
            self._keep = loops.lengths_of(recovery.loop_tokens, closed=False).keep
            if seen != len(ids):  # tokens were forced
                self._seen = loops.letters(ids[-self._keep :])
                self._masked = loops.with_masked("", ids, words)

    @property
    def memory(self) -> LoopMemory:
        """Facts about the output up to the last token that was taken."""
        return LoopMemory(loops.Seen(self._seen, self._count), self._masked, self._called)

    def take(self, token: int, since: Callable[[int], Ids], *, closed: bool) -> str | None:
        """Take one more token; return the kind of loop it completes, or None.

        Args:
          since: returns the output, this token included, from an index on.
          closed: whether a thought had to be closed.
        """
        recovery, words = self._recovery, self._words
        self._count += 1
        grew = False
        if self._keep:
            self._seen = (self._seen + loops.letters((token,)))[-self._keep :]
            masked = loops.with_masked(self._masked, (token,), words)
            grew, self._masked = masked != self._masked, masked
        if recovery.counts_calls and may_end_call(token, words):
            before = self._called
            self._called = called_after(before, since, words)
            if self._called.read > before.read and (kind := self._called.judge(recovery)):
                return kind
        if self._tail is not None:
            self._tail.append(token)
            if kind := looping(self._tail, recovery, closed=closed):
                return kind
        halved, most = closed and recovery.watchdog == "on", recovery.loop_tokens
        if not self._keep:
            return None
        if kind := loops.too_long(self._seen, since, words, most, closed=halved):
            return kind
        return "period" if grew and loops.counted_too_long(self._masked, since, words) else None


def looping(ids: Sequence[int], recovery: Recovery, *, closed: bool) -> str | None:
    """Return the kind of loop by the original rules: "repeat", "runaway", "period" or None.

    Args:
      closed: whether a thought had to be closed; the watchdog looks only then.
    """
    if recovery.repeats and len(ids) >= recovery.repeats:
        last = ids[-recovery.repeats :]
        if last[0] == last[-1] and len(set(last)) == 1:
            return "repeat"
    if recovery.runaway is True and runaway_drop(ids):
        return "runaway"
    copies, least = (2, 0) if recovery.watchdog == "compat" else (3, LEAST_REPEATED)
    watched = closed and recovery.watches
    return "period" if watched and is_periodic(ids, copies=copies, least=least) else None


def runaway_drop(ids: Sequence[int]) -> int:
    """Return how many ids at the end exceed three copies of a loop's unit; 0 without a loop.

    A loop is at least twelve copies of a unit of one to eight ids; the shortest unit counts.
    """
    for period in range(1, LONGEST_UNIT + 1):
        if len(ids) < COPIES * period:
            break
        same = period
        while same < len(ids) and ids[-1 - same] == ids[-1 - same + period]:
            same += 1
        copies = same // period
        if copies >= COPIES:
            return (copies - KEPT) * period
    return 0


def is_periodic(ids: Sequence[int], *, copies: int, least: int) -> bool:
    """Return whether ids end in `copies` of a unit of 12 to 80 ids, `least` ids or more."""
    for period in PERIODS:
        wanted = period * max(copies, -(-least // period))
        if len(ids) < copies * period:
            return False
        if len(ids) < wanted or ids[-1] != ids[-1 - period]:
            continue
        last = ids[-wanted:]
        if last[period:] == last[:-period]:
            return True
    return False
