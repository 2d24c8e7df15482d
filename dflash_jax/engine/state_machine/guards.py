"""Rules that end outputs that loop.

The rule for text is in `loops.py`. This file has those for tool calls and for one token that is
repeated; `rules.py` applies them.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dflash_jax.engine.state_machine import loops
from dflash_jax.engine.state_machine.output_reader import CompleteCall, OutputReader
from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.engine.state_machine.settings import Recovery
from dflash_jax.tool_parsers import malformed_calls
from dflash_jax.tool_parsers.syntax import Syntax

# Equal tool calls in a row, and too many calls, are loops: results follow only after the turn.
REPEATED_CALLS = "repeated_calls"
TOO_MANY_CALLS = "max_calls"


def call_closes(syntax: Syntax) -> tuple[str, ...]:
    """Return the texts that end a call, in all syntaxes that are parsed for a family."""
    return tuple(dict.fromkeys((*syntax.closes, *malformed_calls.CLOSES)))


def may_end_call(token: int, vocabulary: OutputVocabulary) -> bool:
    """Return whether a token can be the last of a call."""
    if not (vocabulary.syntax and vocabulary.tools):
        return False
    if vocabulary.call_ends is not None:
        return token in vocabulary.call_ends
    text = vocabulary.text((token,))
    return any(close[-1] in text for close in call_closes(vocabulary.syntax))


def too_many_calls(calls: Sequence[CompleteCall], recovery: Recovery) -> str | None:
    """Return why the calls of an output end it, or None."""
    if recovery.repeated_calls and equal_calls(calls) >= recovery.repeated_calls:
        return REPEATED_CALLS
    if recovery.max_calls and len(calls) >= recovery.max_calls:
        return TOO_MANY_CALLS
    return None


def equal_calls(calls: Sequence[CompleteCall]) -> int:
    """Return the number of equal calls in a row with which an output ends."""
    return sum(1 for _ in itertools.takewhile(lambda call: call == calls[-1], reversed(calls)))


def repeated_calls_drop(ids: Ids, vocabulary: OutputVocabulary) -> int:
    """Return how many ids at the end exceed the first of the equal calls that they end with."""
    calls = OutputReader(vocabulary).calls(ids)
    kept = len(calls) - equal_calls(calls) + 1
    reader = OutputReader(vocabulary)
    for length, token in enumerate(ids, 1):
        if may_end_call(token, vocabulary) and len(reader.calls(ids[:length])) >= kept:
            return len(ids) - length
    return 0


# A runaway loop has at least `COPIES` copies of a unit of at most `LONGEST_UNIT` ids, of which
# `KEPT` copies count as output.
LONGEST_UNIT = 8
COPIES = 12
KEPT = 3


class LoopMemory(NamedTuple):
    """The end of an output as the loop rules need it for the next token."""

    letters: str = ""  # the end of the output as one character per token, see `loops.letters`
    length: int = 0  # number of tokens of the whole output
    masked: str = ""  # the end of the output with all numbers equal, see `loops.with_masked`


NO_MEMORY = LoopMemory()


class Guard:
    """Applies the rules for repeated text and tokens to the tokens of a step, one by one.

    Args:
      memory: the end of the output before the step, as of the last step.
      ids: the output before the step.
    """

    def __init__(
        self,
        memory: LoopMemory,
        ids: Sequence[int],
        recovery: Recovery,
        vocabulary: OutputVocabulary,
    ):
        self._recovery = recovery
        self._vocabulary = vocabulary
        self._letters = memory.letters
        self._masked = memory.masked
        self._length = len(ids)
        self._last = ids[-1] if ids else -1
        self._run = 0  # number of equal tokens at the end
        if recovery.repeat_limit:
            equal = itertools.takewhile(lambda token: token == self._last, reversed(ids))
            self._run = sum(1 for _ in equal)
        self._keep = 0  # number of letters that the rules need; 0 if they are off
        if recovery.loops:
            self._keep = loops.lengths_of(recovery.loop_tokens, closed=False).keep
            if memory.length != len(ids):  # tokens were forced
                self._letters = loops.letters(ids[-self._keep :])
                self._masked = loops.with_masked("", ids, vocabulary)

    @property
    def memory(self) -> LoopMemory:
        """The end of the output up to the last token that was taken."""
        return LoopMemory(self._letters, self._length, self._masked)

    def take(self, token: int, since: Callable[[int], Ids], *, closed: bool) -> str | None:
        """Take one more token; return the kind of loop it completes, or None.

        Args:
          since: returns the output, this token included, from an index on.
          closed: whether a thought had to be closed.
        """
        recovery = self._recovery
        self._length += 1
        self._run = self._run + 1 if token == self._last else 1
        self._last = token
        masked_grew = False
        if self._keep:
            self._letters = (self._letters + loops.letters((token,)))[-self._keep :]
            masked = loops.with_masked(self._masked, (token,), self._vocabulary)
            masked_grew = masked != self._masked
            self._masked = masked
        if 0 < recovery.repeat_limit <= self._run:
            return "repeat"
        if not self._keep:
            return None
        halved = closed and recovery.watchdog
        limit = recovery.loop_tokens
        kind = loops.too_long(self._letters, since, self._vocabulary, limit, closed=halved)
        if kind is not None:
            return kind
        if masked_grew and loops.counted_too_long(self._masked, since, self._vocabulary):
            return "period"
        return None


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
