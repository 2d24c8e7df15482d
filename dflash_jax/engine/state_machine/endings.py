"""Read from the end of an output's text whether it announces an action.

Without such a cue, an end token always ends the output. With one, `floor.py` lets the target
confirm it by its odds of a tool call; a clearer cue needs less of them.
"""

import dataclasses
import json
import re
from collections.abc import Sequence

from dflash_jax.engine.state_machine.announcements import Cue, cue_of
from dflash_jax.tool_parsers.tool_schema import Tool

FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n`]*$", re.MULTILINE)
COLONS = (":", "\N{FULLWIDTH COLON}")
ELLIPSES = ("...", "\N{HORIZONTAL ELLIPSIS}")
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")
QUESTIONS = ("?", "\N{FULLWIDTH QUESTION MARK}", "\N{ARABIC QUESTION MARK}")
ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d+[.)]|\[[ x]\])\s+\S")
EXAMPLE = re.compile(
    r"\b(?:example|for instance|e\.g|would|could|can|looks?|like this|such as|format|schema|syntax"
    r"|documented|returned|responded|result|output)\b",
    re.IGNORECASE,
)
# Languages of code that is meant to be run, and words that say so.
SHELLS = ("", "sh", "bash", "shell", "zsh", "console", "terminal", "powershell", "cmd", "json",
          "tool_code", "tool_call", "tool")  # fmt: skip
RUNS = re.compile(
    r"\b(?:re)?(?:run|execut|call|invok|launch|start|test|try|ausf\u00fchr|starte|lanc"
    r"|ex\u00e9cut|ejecut"
    r"|rod|esegu|uitvoer|k\u00f6r|kj\u00f8r|k\u00f8r|uruch"
    r"|\u0437\u0430\u043f\u0443[\u0441\u0449]|\u00e7al\u0131\u015ft)"
    r"|\u8fd0\u884c|\u6267\u884c|\u5b9f\u884c|\uc2e4\ud589",
    re.IGNORECASE,
)
RULE = re.compile(r"[\s|:+=_*-]+")  # a rule, or the rule of a table
SMILEY = re.compile(r"(^|\s)[:;=][-o']?[)(\]DPp]")
QUOTES = (
    ("`", "`"),
    ('"', '"'),
    ("\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"),
)
LOOK_BACK = 4000  # characters of the last paragraphs


@dataclasses.dataclass(frozen=True)
class Ending:
    """Cues at the end of an output."""

    cue: Cue = Cue.NONE  # how clearly it announces an action
    colon: bool = False  # in its last punctuation, and not of code, a quotation or a smiley
    ambiguous: bool = False  # its last paragraph asks a question, or it ends inside code
    opened_fence: bool = False  # it ends with an opening code fence
    is_call: bool = False  # it ends with a JSON object in a fence that names a declared tool


def read_ending(text: str, tools: Sequence[Tool] = ()) -> Ending:
    """Return the cues at the end of an output's text."""
    fences = list(FENCE.finditer(text))
    in_fence = len(fences) % 2 == 1
    if in_fence and not text[fences[-1].end() :].strip():
        return Ending(cue_of(text[: fences[-1].start()]), ambiguous=True, opened_fence=True)
    closed = bool(fences) and not in_fence and not text[fences[-1].end() :].strip()
    if in_fence or closed:
        opening = fences[-1 if in_fence else -2]
        block = text[opening.end() : None if in_fence else fences[-1].start()]
        language = opening[0].strip("`~ \t").lower()
        return _after_code(text[: opening.start()], language, block, tools, in_fence=in_fence)
    return _after_prose(text[fences[-1].end() if fences else 0 :][-LOOK_BACK:], tools)


def _after_code(
    before: str, language: str, block: str, tools: Sequence[Tool], *, in_fence: bool
) -> Ending:
    """Return the cues of an output that ends with a code block, closed or not."""
    before = before.rstrip()[-LOOK_BACK:]
    paragraph = _last_paragraph(before)
    asks = any(mark in paragraph for mark in QUESTIONS)
    if _is_call(block, tools) and not asks and not EXAMPLE.search(paragraph):
        return Ending(Cue.STRONG, is_call=True)
    cue = Cue.STRONG if calls_by_text(block, tools) else cue_of(before)
    if cue < Cue.LIKELY or EXAMPLE.search(paragraph):
        cue = Cue.NONE
    elif language not in SHELLS and not RUNS.search(paragraph):
        cue = Cue.NONE  # the block is what was announced: "I'll write a function:"
    return Ending(cue, ambiguous=in_fence or asks)


def calls_by_text(text: str, tools: Sequence[Tool]) -> bool:
    """Return whether the last line of a text calls a declared tool in a syntax of its own."""
    lines = text.strip().splitlines()
    names = "|".join(re.escape(tool.name) for tool in tools)
    if not names or not lines:
        return False
    call = rf"(?:print\()?(?:\w+\.)?(?:{names})\(.*\)+;?"
    call += rf"|(?:action|tool|call|function): *`?(?:{names})\b.*"
    shown = [line.strip() for line in lines[-2:] if not line.lower().startswith("action input")]
    return any(re.fullmatch(call, line, re.IGNORECASE) for line in shown[-1:])


def _is_call(block: str, tools: Sequence[Tool]) -> bool:
    """Return whether a text is a JSON object that names a declared tool and its arguments."""
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return False
    if not isinstance(call, dict):
        return False
    if isinstance(function := call.get("function"), dict):
        call = function
    name = next((call[k] for k in ("name", "tool", "tool_name", "function") if k in call), None)
    given = next((call[k] for k in ("arguments", "parameters", "args", "input") if k in call), {})
    return isinstance(given, dict | str) and any(tool.name == name for tool in tools)


def _last_paragraph(text: str) -> str:
    return re.split(r"\n\s*\n", text.strip())[-1]


def _after_prose(text: str, tools: Sequence[Tool]) -> Ending:
    paragraph = _last_paragraph(text)
    line = text.strip().rpartition("\n")[2]
    # The run of characters at the end that are neither letters nor digits.
    start = len(line)
    while start and not line[start - 1].isalnum():
        start -= 1
    words, trailing = line[:start], line[start:]
    in_code = line.count("`") % 2 == 1
    ambiguous = in_code or any(mark in paragraph for mark in QUESTIONS)
    colon = max(trailing.rfind(mark) for mark in COLONS)
    quoted = colon >= 0 and _is_quoted(words + trailing[:colon])
    is_colon = colon >= 0 and not quoted and not SMILEY.search(line)
    stripped = "".join(c for c in trailing if c.isprintable()).rstrip(" *_")
    trails = stripped.endswith(DASHES) or any(mark in trailing for mark in ELLIPSES)
    trails_off = trails and not RULE.fullmatch(line) and not in_code
    trails_off |= line in ELLIPSES + DASHES
    if calls_by_text(paragraph, tools):
        return Ending(Cue.STRONG)
    cue = Cue.NONE if in_code else _cue_of_prose(paragraph, line)
    return Ending(max(cue, Cue.WEAK if is_colon or trails_off else cue), is_colon, ambiguous)


def _cue_of_prose(paragraph: str, line: str) -> Cue:
    """Return the cue of a paragraph, whose last lines may be the items of a list."""
    if not ITEM.match(line):
        return cue_of(paragraph)
    lines = paragraph.splitlines()
    while lines and ITEM.match(lines[-1]):
        lines.pop()
    announced = lines and lines[-1].rstrip(" *_").endswith(COLONS) and cue_of(lines[-1])
    return Cue.WEAK if announced else min(cue_of(line), Cue.WEAK)


def _is_quoted(before: str) -> bool:
    """Return whether a code span or quotation is still open at the end of a line."""
    return any(
        before.count(left) % 2 == 1 if left == right else before.count(left) > before.count(right)
        for left, right in QUOTES
    ) or bool(re.search(r"(^|[\s(\[])'[^']*$", before))
