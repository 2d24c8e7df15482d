"""The loop rule: how long an output may repeat itself depends on the kind of text.

A loop is a unit of tokens that is repeated. Most healthy repetition is short, or it is data: the
rows of a table, an array of zeros, a refrain. So a loop must reach a number of tokens that depends
on the kind of its text and on where it is: in prose, or in a code fence or a tool call. Loops are
found by token ids. Their text is decoded only when they just reached such a length, so healthy
output costs one search among the last tokens.
"""

import bisect
import enum
import functools
import re
from collections.abc import Callable, Sequence

from dflash_jax.engine.state_machine.announcements import SENTENCE_ENDS, Cue, cue_of
from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.tool_parsers.syntax import CallState

# The kind of a repeated text, which decides how long an output may repeat it.


class Kind(enum.Enum):
    """The kind of a repeated text."""

    TEXT = "text"  # sentences, and everything that is none of the others
    WORD = "word"  # letters without a space, such as one letter again and again
    VERSE = "verse"  # short lines without full stops, such as a refrain
    CODE = "code"  # statements and markup, and text in quotation marks
    RULE = "rule"  # table rules, separators, dot leaders, boards
    DATA = "data"  # items of lists, rows of tables, numbers, escapes, literals such as null
    BLOCK = "block"  # anything in a code fence or a tool call


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
# Most characters of a line, its end included, that is no rule, such as a lone bullet.
SHORT_LINE = 4
SENTENCES = re.compile(
    r"[^\W\d_]{2,},?[ ]+[^\W\d_]{2,}"  # two words
    r"|[^\W\d_]{2,}[.!?\u2026]+(?:\s|$)"  # the end of a sentence
    r"|[\u0e00-\u0eff\u1000-\u109f\u2e80-\u9fff\uac00-\ud7ff]"  # scripts without spaces
)
PART_OF_WORD = re.compile(r"\A[^\W\d_]+|[^\W\d_]+\Z")
SPANS = re.compile(r"`[^`\n]*`")
SYMBOLS = frozenset('{}[]()<>"=\\;&|$%^@~+')
# Most symbols of a sentence, as a share of its characters that are no white space.
MOST_SYMBOLS = 0.1
QUOTES = re.compile('"'), re.compile(r"(?<!\w)'|'(?!\w)")  # an apostrophe is no quotation mark
FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
ITEM = re.compile(
    r"[ \t]*(?:[-*+>\u2022\u2013]|TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|FATAL|\d+[.)]|\[[ xX]?\]"
    r"|[a-z]\))[ \t]+\S"
)
ROW = re.compile(r"[ \t]*\|.*\|[ \t]*|[^,;\t|\n]*(?:(?:,(?! )|;(?! )|\t|\|)[^,;\t|\n]*){2,}")
LONGEST_VERSE = 60  # most characters of a line of verse


def kind_of(text: str, whole: str = "") -> Kind:
    """Return the kind of a repeated text outside code fences and calls.

    Args:
      text: copies of the unit; it may begin within a word.
      whole: the output that ends with them.
    """
    text = text.strip("\N{REPLACEMENT CHARACTER}")
    if not text.strip():
        return Kind.RULE if text and "\n" not in text else Kind.TEXT  # an indentation; blank lines
    word = PART_OF_WORD.sub("", text)
    part = word if any(map(str.isalnum, word)) else text
    if RULES.fullmatch(part):
        return Kind.TEXT if len(part) <= SHORT_LINE * part.count("\n") else Kind.RULE
    rest = part
    for pattern in (ESCAPES, HEXADECIMAL, NUMBERS, LITERALS, SAME_LETTER, SEQUENCES):
        rest = pattern.sub(" ", rest)
    if "=" not in part and any(map(str.isdigit, part)):
        rest = ONE_LETTER.sub(" ", rest)
    if rest != part and RULES.fullmatch(rest):
        return Kind.DATA
    if not any(map(str.isalnum, part)):
        return Kind.TEXT  # exclamation marks, emoji
    lines = [line for line in whole_lines(text, whole) if line.strip()]
    if lines and all(ITEM.match(line) or ROW.fullmatch(line) for line in lines):
        return Kind.DATA
    quoted = is_quoted(whole)
    if part.isascii() and part.isalpha():
        return Kind.DATA if quoted else Kind.WORD
    if not _is_prose(part) or quoted:
        return Kind.CODE
    return Kind.VERSE if _is_verse(lines) else Kind.TEXT


def whole_lines(text: str, whole: str) -> list[str]:
    """Return the complete lines at the end of an output that a repeated text covers."""
    if "\n" not in text:
        return []
    start = len(whole) - len(text)
    starts_line = start <= 0 or whole[start - 1] == "\n"
    lines = text.split("\n")[:-1]
    return lines if starts_line else lines[1:] or lines


def _is_verse(lines: list[str]) -> bool:
    """Return whether lines are those of a verse: short, different, not ended like sentences."""
    if len(set(lines)) < 2 or any(len(x) > LONGEST_VERSE or x[0] == "#" for x in lines):
        return False
    ended = sum(
        line.rstrip().endswith((".", "?", ":", "\N{IDEOGRAPHIC FULL STOP}")) for line in lines
    )
    return 3 * ended <= len(lines) and all(cue_of(line) < Cue.LIKELY for line in set(lines))


def _is_prose(text: str) -> bool:
    prose = SPANS.sub(" ", text)
    if not SENTENCES.search(prose):
        return False
    symbols = sum(c in SYMBOLS for c in prose)
    return symbols <= MOST_SYMBOLS * sum(not c.isspace() for c in prose)


def is_quoted(text: str) -> bool:
    """Return whether a quotation is open at the end of a text, in its last line."""
    line = text[text.rfind("\n") + 1 :]
    return any(len(mark.findall(line)) % 2 for mark in QUOTES)


def in_block(text: str, vocabulary: OutputVocabulary) -> bool:
    """Return whether an output ends in a code fence or a tool call."""
    if len(FENCE.findall(text)) % 2:
        return True
    syntax = vocabulary.syntax if vocabulary.tools else None
    return syntax is not None and syntax.call_state(text) is CallState.OPEN


# The longest units, in tokens, of three sizes.
SHORT = 8
MEDIUM = 80
LONG = 512
LEAST_READ = 24  # least number of tokens whose text is read to see what is repeated

# What ends a loop of a kind, for units of each size: a multiple of `loop_tokens`, and a number of
# copies. Both must be reached.
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


def letters(ids: Sequence[int]) -> str:
    """Return ids as a string, one character per token. Larger vocabularies do not exist."""
    return "".join([chr(token % 0x110000) for token in ids])


class Lengths:
    """The lengths that end loops, in tokens.

    Args:
      by_unit: for the units of 1, 2, 3, ... tokens, all lengths that end a loop.

    Attributes:
      of: all lengths that end a loop, by the tokens of its unit.
      least: the least of them, by the tokens of the unit.
      longest: tokens of the longest unit.
      keep: number of tokens at the output's end that are needed: the longest allowed loop, and one
        more.
      key: number of tokens at the end that every loop of any of these lengths repeats.
    """

    def __init__(self, by_unit: Sequence[tuple[int, ...]]):
        self.of: list[tuple[int, ...]] = [(), *by_unit]
        self.longest = len(by_unit)
        self.least = [min(lengths, default=0) for lengths in self.of]
        self.keep = max(map(max, by_unit)) + 1
        self.key = min(least - unit for unit, least in enumerate(self.least) if unit)


@functools.lru_cache(maxsize=64)  # one for all requests with these settings
def lengths_of(loop_tokens: int, *, closed: bool) -> Lengths:
    """Return the lengths that end loops, for each unit in the order of `KINDS`.

    Args:
      loop_tokens: the length for short units of text.
      closed: whether a thought had to be closed: the lengths of medium units are halved then.
    """
    by_unit = []
    for unit in range(1, LONG + 1):
        size = bisect.bisect_left((SHORT, MEDIUM), unit)  # index of the limits: 0, 1 or 2
        parts = 2 if size == 1 and closed else 1
        limits = (LIMITS[kind][size] for kind in KINDS)
        by_unit.append(tuple(max(m * loop_tokens // parts, copies * unit) for m, copies in limits))
    return Lengths(by_unit)


def reached(ids: str, lengths: Lengths) -> tuple[int, int]:
    """Return the unit of a loop that has just reached a length, and that length; (0, 0) if none.

    Each loop reaches each length once, at one token, regardless of how tokens are batched.

    Args:
      ids: the end of the output, one character per token.
    """
    size = len(ids)
    key_start = size - lengths.key
    if key_start < 1:
        return 0, 0
    key = ids[key_start:]
    first = max(key_start - lengths.longest, 0)
    copy_start = ids.rfind(key, first, size - 1)
    shorter: list[int] = []
    while copy_start >= 0:
        unit = key_start - copy_start
        least = lengths.least[unit]
        if _repeats(ids, unit, least) and not any(_repeats(ids, u, least) for u in shorter):
            covered = (length for length in lengths.of[unit] if _covers(ids, unit, length))
            return unit, max(covered, default=0)
        shorter.append(unit)
        copy_start = ids.rfind(key, first, copy_start + lengths.key - 1)
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
    letters: str,
    since: Callable[[int], Ids],
    vocabulary: OutputVocabulary,
    loop_tokens: int,
    *,
    closed: bool,
) -> str | None:
    """Return "runaway" or "period" if a loop just became too long for its kind of text.

    Args:
      letters: the end of the output, one character a token.
      since: returns the output from an index on; called only if a loop reached a length.
      closed: whether a thought had to be closed: the lengths of medium units are halved then.
    """
    lengths = lengths_of(loop_tokens, closed=closed)
    unit, length = reached(letters, lengths)
    if not length:
        return None
    ids = since(0)
    repeated = vocabulary.text(ids[-max(2 * unit, LEAST_READ) :])
    whole = vocabulary.text(ids)
    kind = Kind.BLOCK if in_block(whole, vocabulary) else kind_of(repeated, whole)
    if lengths.of[unit][KINDS.index(kind)] > length:
        return None
    return "runaway" if unit <= SHORT else "period"


# The rest finds loops with a counter: prose that is equal but for its numbers, such as "Step 7 is
# done."
#
# The output is read with every number as one and the same token. Sentences or lines that repeat in
# this form end the output later than equal ones, and only in prose: in lists, tables, logs, code
# and calls, counting is what data does.


# A loop with a counter has at least so many copies and tokens, of a unit of at most so many tokens.
COPIES = 12
LENGTH = 512
LONGEST = 160
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
    token_text = text((token,))
    if not any(map(str.isdigit, token_text)):
        return chr(token % 0x110000)
    return NUMBER + DIGITS.sub("", token_text).strip()


def with_masked(masked: str, tokens: Sequence[int], vocabulary: OutputVocabulary) -> str:
    """Return the end of a masked output with more tokens."""
    for token in tokens:
        characters = _masked(vocabulary.text, token)
        if characters.startswith(NUMBER) and masked.endswith(NUMBER):
            characters = characters[1:]
        masked += characters
    return masked[-LENGTHS.keep :]


def counted_too_long(
    masked: str, since: Callable[[int], Ids], vocabulary: OutputVocabulary
) -> bool:
    """Return whether a loop of prose with a counter just became too long.

    Args:
      masked: the end of the masked output.
      since: returns the output from an index on; called only if a loop reached its length.
    """
    unit, length = reached(masked, LENGTHS)
    if not length or NUMBER not in masked[-unit:]:
        return False
    whole = vocabulary.text(since(0))
    if in_block(whole, vocabulary):
        return False
    ends = [at.end() for at in SENTENCE_ENDS.finditer(whole)][-COPIES - 1 :]
    if len(ends) <= COPIES:
        return False
    last = whole[ends[0] : ends[-1]]
    parts = [part for part in SENTENCE_ENDS.split(last) if part.strip()]
    if any(FIELDS.search(part) for part in parts):
        return False
    return kind_of(DIGITS.sub("", last), whole) is Kind.TEXT
