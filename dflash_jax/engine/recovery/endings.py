"""Read from the end of an output's text whether it announces an action.

These cues only move the odds that the target must give a tool call, see `floor.py`.
"""

import dataclasses
import re

FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n`]*$", re.MULTILINE)
COLONS = (":", "\N{FULLWIDTH COLON}")
ELLIPSES = ("...", "\N{HORIZONTAL ELLIPSIS}")
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")
QUESTIONS = ("?", "\N{FULLWIDTH QUESTION MARK}")
# A last sentence about the speaker's own next step; English only: elsewhere the odds decide.
INTENT = re.compile(
    r"((now|next|first|then|so|ok|okay|alright),?\s+)*"
    r"(let me (?!know\b)|let's |i'll |i will |i'm going to |i am going to )",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
SMILEY = re.compile(r"(^|\s)[:;]-?[()DPp]+$")
RULE = re.compile(r"[-|:+= ]*")  # a line of a table, or a horizontal rule
QUOTES = (
    ("`", "`"),
    ('"', '"'),
    ("\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"),
)


@dataclasses.dataclass(frozen=True)
class Ending:
    """Cues at the end of an output."""

    colon: bool = False  # in its last punctuation, and not of code, a quotation or a smiley
    trails_off: bool = False  # it ends in an ellipsis or a dash
    intends: bool = False  # its last sentence announces the speaker's next step
    ambiguous: bool = False  # its last paragraph asks a question, or it ends inside code
    opened_fence: bool = False  # it ends with an opening code fence

    @property
    def announces(self) -> bool:
        """Whether the text announces that more follows."""
        return self.colon or self.trails_off or self.intends


def read_ending(text: str) -> Ending:
    """Return the cues at the end of an output's text."""
    fences = list(FENCE.finditer(text))
    in_fence = len(fences) % 2 == 1
    opened = in_fence and not text[fences[-1].end() :].strip()
    paragraph = re.split(r"\n\s*\n", text.strip())[-1]
    line = text.strip().rpartition("\n")[2]
    # The run of characters at the end that are neither letters nor digits.
    start = len(line)
    while start and not line[start - 1].isalnum():
        start -= 1
    words, trailing = line[:start], line[start:]
    in_code = in_fence or (not FENCE.match(line) and line.count("`") % 2 == 1)
    ambiguous = in_code or any(mark in paragraph for mark in QUESTIONS)
    colon = max(trailing.rfind(mark) for mark in COLONS)
    quoted = colon >= 0 and _is_quoted(words + trailing[:colon])
    is_colon = colon >= 0 and not quoted and not in_fence and not SMILEY.search(line)
    stripped = "".join(c for c in trailing if c.isprintable()).rstrip(" *_")
    trails = stripped.endswith(DASHES) or any(mark in trailing for mark in ELLIPSES)
    trails_off = trails and not RULE.fullmatch(line) and not in_code
    trails_off |= line in ELLIPSES + DASHES
    plain = paragraph.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    intends = not in_code and bool(INTENT.match(SENTENCE.split(plain)[-1]))
    return Ending(is_colon, trails_off, intends, ambiguous, opened)


def _is_quoted(before: str) -> bool:
    """Return whether a code span or quotation is still open at the end of a line."""
    return any(
        before.count(left) % 2 == 1 if left == right else before.count(left) > before.count(right)
        for left, right in QUOTES
    ) or bool(re.search(r"(^|[\s(\[])'[^']*$", before))
