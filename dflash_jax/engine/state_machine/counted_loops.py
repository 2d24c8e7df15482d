"""Find loops with a counter: prose that is equal but for its numbers, such as "Step 7 is done."

The output is read with every number as one and the same token. Sentences or lines that repeat in
this form end the output later than equal ones, and only in prose: in lists, tables, logs, code and
calls, counting is what data does.
"""

import functools
import re
from collections.abc import Callable, Sequence

from dflash_jax.engine.state_machine.announcements import SENTENCE_ENDS
from dflash_jax.engine.state_machine.kinds import Kind, in_block, kind_of
from dflash_jax.engine.state_machine.loops import Lengths, reached
from dflash_jax.engine.state_machine.words import Ids, Words

COPIES, LENGTH, LONGEST = 12, 512, 160  # of a loop, in tokens; and the longest unit
NUMBER = "\U0010ffff"
LENGTHS = Lengths([(max(LENGTH, COPIES * unit),) for unit in range(1, LONGEST + 1)])
DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
# What begins the lines of lists and logs, and fields of logs and of data.
FIELDS = re.compile(
    r"^[\W\d]*\d|^\s*(?:[-*+|#>\u2022]\s|[A-Z]{3,}\b|[a-z]\))"
    r"|\d:\d\d|\d{4}-\d\d|\w=\S|\w: ?\d|\t|\|"
)


@functools.lru_cache(maxsize=65536)
def _masked(text: Callable[[Ids], str], token: int) -> str:
    """Return a token as characters, with one character for a number."""
    shown = text((token,))
    if not any(map(str.isdigit, shown)):
        return chr(token % 0x110000)
    return NUMBER + DIGITS.sub("", shown).strip()


def extended(masked: str, tokens: Sequence[int], words: Words) -> str:
    """Return the end of a masked output with more tokens."""
    for token in tokens:
        more = _masked(words.text, token)
        if more.startswith(NUMBER) and masked.endswith(NUMBER):
            more = more[1:]
        masked += more
    return masked[-LENGTHS.keep :]


def too_long(masked: str, since: Callable[[int], Ids], words: Words) -> bool:
    """Return whether a loop of prose with a counter just became too long.

    Args:
      masked: the end of the masked output.
      since: returns the output from an index on; called only if a loop reached its length.
    """
    unit, length = reached(masked, LENGTHS)
    if not length or NUMBER not in masked[-unit:]:
        return False
    whole = words.text(since(0))
    if in_block(whole, words):
        return False
    ends = [at.end() for at in SENTENCE_ENDS.finditer(whole)][-COPIES - 1 :]
    if len(ends) <= COPIES:
        return False
    last = whole[ends[0] : ends[-1]]
    parts = [part for part in SENTENCE_ENDS.split(last) if part.strip()]
    if any(FIELDS.search(part) for part in parts):
        return False
    return kind_of(DIGITS.sub("", last), whole) is Kind.TEXT
