"""The default loop rule: how long an output may repeat itself depends on the kind of text.

A loop is a unit of tokens that is repeated. Most healthy repetition is short, or it is data: the
rows of a table, an array of zeros, a refrain. So a loop must reach a number of tokens that depends
on the kind of its text and on where it is: in prose, or in a code fence or a tool call. Loops are
found by token ids. Their text is decoded only when they just reached such a length, so healthy
output costs one search among the last tokens. `kinds` decides the kind of a text.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dflash_jax.engine.state_machine.kinds import Kind, in_block, kind_of
from dflash_jax.engine.state_machine.words import Ids, Words

SHORT, MEDIUM, LONG = 8, 80, 512  # longest units of three sizes
LEAST_READ = 24  # tokens whose text shows what is repeated

# For units of each size, the lengths that end a loop of a kind: a multiple of `loop_tokens`, and a
# number of copies; both must be reached.
LIMITS: dict[Kind, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    Kind.TEXT: ((1, 12), (2, 3), (2, 3)),
    Kind.WORD: ((2, 12), (2, 3), (2, 3)),
    Kind.VERSE: ((4, 12), (8, 3), (8, 6)),
    Kind.CODE: ((8, 12), (8, 3), (16, 6)),
    Kind.RULE: ((8, 12), (16, 3), (16, 8)),
    Kind.DATA: ((16, 12), (16, 3), (16, 8)),
    Kind.BLOCK: ((32, 12), (32, 3), (32, 8)),
}
KINDS = list(LIMITS)


class Seen(NamedTuple):
    """The end of an output as one character per token, and the length of the whole output."""

    ids: str = ""
    count: int = 0


def letters(ids: Sequence[int]) -> str:
    """Return ids as a string, one character per token. Larger vocabularies do not exist."""
    return "".join([chr(token % 0x110000) for token in ids])


class Lengths:
    """The lengths that end loops, in tokens.

    Args:
      of: for the units of 1, 2, 3, ... tokens, all lengths that end a loop.
    """

    def __init__(self, of: Sequence[tuple[int, ...]]):
        self.of: list[tuple[int, ...]] = [(), *of]
        self.longest = len(of)
        self.least = [min(lengths, default=0) for lengths in self.of]  # the smallest of them
        # Tokens at the end that must be known: the longest allowed loop, and one more.
        self.keep = max(map(max, of)) + 1
        # Tokens at the end that every loop of any of these lengths repeats.
        self.key = min(least - unit for unit, least in enumerate(self.least) if unit)


@functools.lru_cache(maxsize=64)  # one for all requests with these settings
def lengths_of(loop_tokens: int, *, closed: bool) -> Lengths:
    """Return the lengths that end loops, for each unit in the order of `KINDS`.

    Args:
      loop_tokens: the length for short units of text.
      closed: whether a thought had to be closed: the lengths of medium units are halved then.
    """
    of = []
    for unit in range(1, LONG + 1):
        size = (unit > SHORT) + (unit > MEDIUM)
        parts = 2 if size == 1 and closed else 1
        limits = (LIMITS[kind][size] for kind in KINDS)
        of.append(tuple(max(m * loop_tokens // parts, copies * unit) for m, copies in limits))
    return Lengths(of)


def reached(ids: str, lengths: Lengths) -> tuple[int, int]:
    """Return the unit of a loop that has just reached a length, and that length; (0, 0) if none.

    Each loop reaches each length once, at one token, regardless of how tokens are batched. `ids` is
    the end of the output, one character per token.
    """
    size = len(ids)
    at = size - lengths.key
    if at < 1:
        return 0, 0
    first, key = max(at - lengths.longest, 0), ids[at:]
    shorter: list[int] = []
    while (at := ids.rfind(key, first, at + lengths.key - 1)) >= 0:
        unit = size - lengths.key - at
        least = lengths.least[unit]
        if _repeats(ids, unit, least) and not any(_repeats(ids, u, least) for u in shorter):
            of = (length for length in lengths.of[unit] if _covers(ids, unit, length))
            return unit, max(of, default=0)
        shorter.append(unit)
    return 0, 0


def _repeats(ids: str, unit: int, length: int) -> bool:
    """Return whether the last `length` tokens repeat a unit."""
    return len(ids) >= length and ids[unit - length :] == ids[-length:-unit]


def _covers(ids: str, unit: int, length: int) -> bool:
    """Return whether the loop at the end covers exactly `length` tokens."""
    if len(ids) > length and ids[-length - 1] == ids[unit - length - 1]:
        return False
    return _repeats(ids, unit, length)


def too_long(
    seen: str, since: Callable[[int], Ids], words: Words, loop_tokens: int, *, closed: bool
) -> str | None:
    """Return "runaway" or "period" if a loop just became too long for its kind of text.

    Args:
      seen: the end of the output, one character a token.
      since: returns the output from an index on; called only if a loop reached a length.
      closed: whether a thought had to be closed: the lengths of medium units are halved then.
    """
    lengths = lengths_of(loop_tokens, closed=closed)
    unit, length = reached(seen, lengths)
    if not length:
        return None
    ids = since(0)
    repeated = words.text(ids[-max(2 * unit, LEAST_READ) :])
    whole = words.text(ids)
    kind = Kind.BLOCK if in_block(whole, words) else kind_of(repeated, whole)
    if lengths.of[unit][KINDS.index(kind)] > length:
        return None
    return "runaway" if unit <= SHORT else "period"
