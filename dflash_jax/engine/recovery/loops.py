"""The default loop rule: how long an output may repeat itself depends on the kind of text.

A loop is a unit of tokens that is repeated. Most healthy repetition is short, or it is data: the
rule of a wide table, a row of zeros, a dot leader. So a loop must reach a number of tokens that
depends on the kind of its text. Loops are found by token ids. Their text is decoded only when they
just reached such a length, so healthy output costs one search among the last tokens.
"""

import enum
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dflash_jax.engine.recovery.words import Ids, Words
from dflash_jax.tool_parsers.syntax import CallState

SHORT, LONG = 8, 80  # longest units
COPIES, LONG_COPIES = 12, 3  # of a short unit, of a longer one
LEAST_READ = 24  # tokens whose text shows what is repeated


class Kind(enum.Enum):
    """The kind of a repeated text, with the lengths that end it in multiples of `loop_tokens`.

    The first number is for units of 1 to 8 tokens, the second for units of 9 to 80.
    """

    TEXT = (1, 2)  # sentences, and everything that is none of the others
    WORD = (2, 2)  # letters without a space, such as one letter again and again
    CODE = (2, 3)  # statements, markup, cells of tables, anything in a code fence or a call
    RULE = (2, 8)  # table rules, separators, dot leaders, boards
    DATA = (4, 8)  # numbers, escapes, hexadecimal digits, base64 of zeros, null and the like


KINDS = list(Kind)


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
      loop_tokens: the length for short units of text.
      closed: whether a thought had to be closed: the lengths of longer units are halved then.
    """

    def __init__(self, loop_tokens: int, *, closed: bool):
        self.of: list[tuple[int, ...]] = [()]  # by a unit's length, the lengths of the kinds
        for unit in range(1, LONG + 1):
            long = unit > SHORT
            copies, parts = LONG_COPIES if long else COPIES, 2 if long and closed else 1
            lengths = (kind.value[long] * loop_tokens // parts for kind in Kind)
            self.of.append(tuple(max(length, copies * unit) for length in lengths))
        self.least = [min(lengths, default=0) for lengths in self.of]  # the smallest of them
        # Tokens at the end that must be known: the longest allowed loop, and one more.
        self.keep = max(map(max, self.of[1:])) + 1
        # Tokens at the end that every loop of any of these lengths repeats.
        self.key = min(least - unit for unit, least in enumerate(self.least) if unit)


lengths_of = functools.lru_cache(maxsize=64)(Lengths)  # one for all requests with these settings


def reached(ids: str, lengths: Lengths) -> tuple[int, int]:
    """Return the unit of a loop that has just reached a length, and that length; (0, 0) if none.

    Each loop reaches each length once, at one token, regardless of how tokens are batched. `ids` is
    the end of the output, one character per token.
    """
    size = len(ids)
    at = size - lengths.key
    if at < 1:
        return 0, 0
    first, key = max(at - LONG, 0), ids[at:]
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


# -- the text of a loop -----------------------------------------------------------------------

ESCAPES = re.compile(r"\\[xuU][0-9a-fA-F]+|\\[0-7]+|\\[a-z]|&#?\w+;|%[0-9a-fA-F]{2}")
NUMBERS = re.compile(r"0[xX][0-9a-fA-F_]+[uUlL]*|\d[\d_.,]*(?:[eE][+-]?\d+)?(?:[fFlLuUjn]+\b)?")
LITERALS = re.compile(r"\b(?:null|none|nil|true|false|nan|inf|n/?a|undefined)\b", re.IGNORECASE)
HEXADECIMAL = re.compile(r"\b(?=[a-fA-F]*\d|([a-fA-F])\1+\b)[0-9a-fA-F]{2,}\b")
SAME_LETTER = re.compile(r"([A-Z])\1{3,}")  # base64 of zeros
SEQUENCES = re.compile(r"\b[ACGTUN]{3,}\b")  # of nucleotides
ONE_LETTER = re.compile(r"(?<![^\W\d_])[A-Za-z](?![^\W\d_])")  # of paths, notes, boards
RULES = re.compile(
    r"[-\s=_*#~.|+:/\\<>^'\"`,;()\[\]{}&%@$\u00b7\u2022\u2026\u2500-\u259f\u2800-\u28ff]*"
)
SHORT_LINE = 4  # characters of a line, its end included, that is no rule, such as a lone bullet
SENTENCES = re.compile(
    r"[^\W\d_]{2,},?[ ]+[^\W\d_]{2,}"  # two words
    r"|[^\W\d_]{2,}[.!?\u2026]+(?:\s|$)"  # the end of a sentence
    r"|[\u0e00-\u0eff\u1000-\u109f\u2e80-\u9fff\uac00-\ud7ff]"  # scripts without spaces
)
PART_OF_WORD = re.compile(r"\A[^\W\d_]+|[^\W\d_]+\Z")
SPANS = re.compile(r"`[^`\n]*`")
SYMBOLS = frozenset('{}[]()<>"=\\;&|$%^@~+')
MOST_SYMBOLS = 0.1  # of the characters that are no white space, in a sentence
QUOTES = re.compile('"'), re.compile(r"(?<!\w)'|'(?!\w)")  # an apostrophe is no quotation mark
FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


def kind_of(text: str, *, in_code: Callable[[], bool]) -> Kind:
    """Return the kind of a repeated text.

    Args:
      text: copies of the unit; it may begin within a word.
      in_code: returns whether the text is in a code fence, a tool call or a quotation; called only
        for words.
    """
    text = text.strip("\N{REPLACEMENT CHARACTER}")
    if not text.strip():
        return Kind.RULE if text and "\n" not in text else Kind.TEXT  # an indentation; blank lines
    whole = PART_OF_WORD.sub("", text)
    text = whole if any(map(str.isalnum, whole)) else text
    if RULES.fullmatch(text):
        return Kind.TEXT if len(text) <= SHORT_LINE * text.count("\n") else Kind.RULE
    rest = text
    for pattern in (ESCAPES, HEXADECIMAL, NUMBERS, LITERALS, SAME_LETTER, SEQUENCES):
        rest = pattern.sub(" ", rest)
    if "=" not in text and any(map(str.isdigit, text)):
        rest = ONE_LETTER.sub(" ", rest)
    if rest != text and RULES.fullmatch(rest):
        return Kind.DATA
    if not any(map(str.isalnum, text)):
        return Kind.TEXT  # exclamation marks, emoji
    if text.isascii() and text.isalpha():
        return Kind.DATA if in_code() else Kind.WORD
    return Kind.TEXT if _is_prose(text) and not in_code() else Kind.CODE


def _is_prose(text: str) -> bool:
    prose = SPANS.sub(" ", text)
    if not SENTENCES.search(prose):
        return False
    symbols = sum(c in SYMBOLS for c in prose)
    return symbols <= MOST_SYMBOLS * sum(not c.isspace() for c in prose)


def in_code(text: str, words: Words) -> bool:
    """Return whether an output ends in a code fence, a tool call, or quotes of the last line."""
    line = text[text.rfind("\n") + 1 :]
    if len(FENCE.findall(text)) % 2 or any(len(q.findall(line)) % 2 for q in QUOTES):
        return True
    syntax = words.syntax if words.tools else None
    return syntax is not None and syntax.call_state(text) is CallState.OPEN


def too_long(
    seen: str, since: Callable[[int], Ids], words: Words, loop_tokens: int, *, closed: bool
) -> str | None:
    """Return "runaway" or "period" if a loop just became too long for its kind of text.

    Args:
      seen: the end of the output, one character a token.
      since: returns the output from an index on; called only if a loop reached a length.
      closed: whether a thought had to be closed: the lengths of longer units are halved then.
    """
    lengths = lengths_of(loop_tokens, closed=closed)
    unit, length = reached(seen, lengths)
    if not length:
        return None
    ids = since(0)
    repeated = words.text(ids[-max(2 * unit, LEAST_READ) :])
    kind = kind_of(repeated, in_code=lambda: in_code(words.text(ids), words))
    if lengths.of[unit][KINDS.index(kind)] > length:
        return None
    return "runaway" if unit <= SHORT else "period"
