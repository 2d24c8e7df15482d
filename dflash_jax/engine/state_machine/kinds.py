"""The kind of a repeated text, which decides how long an output may repeat it."""

import enum
import re

from dflash_jax.engine.state_machine.announcements import Cue, cue_of
from dflash_jax.engine.state_machine.words import Words
from dflash_jax.tool_parsers.syntax import CallState


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
FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
ITEM = re.compile(
    r"[ \t]*(?:[-*+>\u2022\u2013]|TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|FATAL|\d+[.)]|\[[ xX]?\]"
    r"|[a-z]\))[ \t]+\S"
)
ROW = re.compile(r"[ \t]*\|.*\|[ \t]*|[^,;\t|\n]*(?:(?:,(?! )|;(?! )|\t|\|)[^,;\t|\n]*){2,}")
LONGEST_VERSE = 60  # characters of a line


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


def in_block(text: str, words: Words) -> bool:
    """Return whether an output ends in a code fence or a tool call."""
    if len(FENCE.findall(text)) % 2:
        return True
    syntax = words.syntax if words.tools else None
    return syntax is not None and syntax.call_state(text) is CallState.OPEN
