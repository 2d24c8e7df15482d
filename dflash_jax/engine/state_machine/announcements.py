"""Read from a sentence whether the speaker announces an action of their own.

An announcement is a sentence in the first person about the near future ("let me", "I'll", "je
vais") with a verb of an action that a tool can take. Sentences that leave the next step to the
reader, by a condition or a question, announce nothing; promises to wait or to explain do not
either. `languages.toml` has the words of each language.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Sequence

from dflash_jax.engine.state_machine.languages import Language, english, languages, words
from dflash_jax.tool_parsers.tool_schema import Tool


class Cue(enum.IntEnum):
    """How clearly the end of an output shows that a tool call should follow."""

    NONE = 0  # no sign of it
    WEAK = 1  # an unfinished sentence
    LIKELY = 2  # an announcement with a verb that is not known
    STRONG = 3  # an announcement with a verb of an action


QUOTED = re.compile(
    r'"[^"\n]*"|\u201e[^\u201c\u201d\n]*[\u201c\u201d]|\u201c[^\u201d\n]*\u201d'
    r"|\u00ab[^\u00bb\n]*\u00bb|\u00bb[^\u00ab\n]*\u00ab|\u300c[^\u300d\n]*\u300d"
    r"|\u300e[^\u300f\n]*\u300f|^ {0,3}>.*$",
    re.MULTILINE,
)
SPANS = re.compile(r"`[^`\n]*`")
# File names and paths, whose parts are no words of the sentence.
PATHS = re.compile(
    r"(?<![\w.~@-])[\w.~@-]*(?:[/\\_](?=\w)|(?<=\w)\.(?=[a-z]))[\w./\\~@:-]*(?<=[\w/])",
    re.ASCII,
)
EMOJI = re.compile("[\u2600-\u27bf\u2b50\u23e9-\u23fa\U0001f000-\U0001faff]\ufe0f?")
MARKUP = re.compile(r"^[\s>#*_\-\u2022\u2013\u2014]+|[*_]+")
SENTENCE_ENDS = re.compile(r"(?<=[.!?\u2026\u061f\u0964])\s+|(?<=[\u3002\uff01\uff1f])\s*|\n+")
PARTS = re.compile(
    r"[,;:\u060c\uff0c\uff1b\u3001]\s*|\s+[-\u2013\u2014]\s+|\s+\b(?:so|and|but|then)\b\s+"
)
RESULT = re.compile(r":\s+(?:yes\b|no\b|.*=)")  # "Let me check: yes, it is there."
PURPOSE = re.compile(r",? so (?:that )?you\b.*")
SHORT = 7  # words of "Reading the file now.", which may be the subject of a longer sentence
LONGEST = 400  # characters of a sentence


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, in lower case, without emphasis.

    Quotations, code and paths become "`".
    """
    plain = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").replace("\u200b", "")
    plain = PATHS.sub("`", QUOTED.sub("`", SPANS.sub("`", plain)))
    plain = EMOJI.sub("\n", plain)
    parts = (MARKUP.sub("", part).strip() for part in SENTENCE_ENDS.split(plain))
    return [part.lower() for part in parts if any(c.isalnum() or c == "`" for c in part)]


def cue_of(text: str) -> Cue:
    """Return how clearly the last sentences of a text announce an action.

    The last sentence counts, and the one before it if the last only asks to wait.
    """
    last: Cue = Cue.NONE
    for sentence in reversed(sentences(text[-4 * LONGEST :])[-3:]):
        cue = max(last, _cue(sentence))
        if cue >= Cue.LIKELY or not words().filler.match(sentence):
            return cue
        last = Cue.WEAK
    return last


def _cue(sentence: str) -> Cue:
    sentence = PURPOSE.sub("", words().whether.sub(r"\1 whether", sentence[-LONGEST:]))
    sentence = words().waiting.sub(", let me ", sentence)
    told = sentence.partition(": ")[2]
    if RESULT.search(sentence) or words().finite.search(told):
        return Cue.NONE
    found = max(_announces(sentence, language) for language in languages().values())
    if found is Cue.NONE and not english().asks.search(sentence):
        start = words().lead_ins.sub("", sentence)
        begins = words().gerund.match(start) or words().gerund.match(sentence)
        if begins and not words().finite.search(start) and len(start.split()) <= SHORT:
            verb = words().adverbs.sub("", start)
            acts = english().acts.match(verb) and not _idle(verb, english())
            return Cue.STRONG if acts else found
    return found


def _announces(sentence: str, language: Language) -> Cue:
    """Return how clearly a sentence announces an action in a language."""
    if language.asks.search(sentence):
        return Cue.NONE
    if language.whole is not None:
        whole = language.whole.search(sentence)
        if whole and not language.idle.search(_clause(sentence, whole.start(), whole.start())):
            return Cue.STRONG if language.acts.search(sentence) else Cue.LIKELY
    found = Cue.NONE
    for pattern in (language.future, language.opens):
        for opening in pattern.finditer(sentence) if pattern else ():
            if language is english():
                clause = PARTS.split(sentence[: opening.start()])[-1]  # "The log is empty, so"
                if words().lead_ins.sub("", clause.strip() + " ").strip():
                    continue  # no clause begins here
                rest = words().adverbs.sub("", sentence[opening.end() :])
                if not _idle(rest, language):
                    found = max(found, Cue.STRONG if language.acts.match(rest) else Cue.LIKELY)
                continue
            act = language.acts.search(sentence, opening.start())
            end = act.end() if act else opening.end()
            if (act or pattern is language.future) and not language.idle.search(
                _clause(sentence, opening.start(), end)
            ):
                found = max(found, Cue.STRONG if act else Cue.LIKELY)
    return found


def _clause(sentence: str, start: int, verb: int) -> str:
    """Return the clause with a verb that ends at an index; the words before `start` belong to it
    unless a comma separates them.
    """
    begin = max(sentence.rfind(mark, 0, start) for mark in ",;:\u060c\uff0c\u3001") + 1
    end = words().clause.search(sentence, verb)
    return sentence[begin : end.start() if end else None]


def _idle(rest: str, language: Language) -> bool:
    return bool(language.idle.match(rest))


# Read from the end of an output's text whether it announces an action.
#
# Without such a cue, an end token always ends the output. With one, `floor.py` lets the target
# confirm it by its odds of a tool call; a clearer cue needs less of them.


FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n`]*$", re.MULTILINE)
COLONS = (":", "\N{FULLWIDTH COLON}")
ELLIPSES = ("...", "\N{HORIZONTAL ELLIPSIS}")
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")
QUESTIONS = ("?", "\N{FULLWIDTH QUESTION MARK}", "\N{ARABIC QUESTION MARK}")
ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d+[.)]|\[[ x]\])\s+\S")
# Languages of code that is meant to be run, and words that say so.
SHELLS = ("", "sh", "bash", "shell", "zsh", "console", "terminal", "powershell", "cmd", "json",
          "tool_code", "tool_call", "tool")  # fmt: skip
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
    if _is_call(block, tools) and not asks and not words().example.search(paragraph):
        return Ending(Cue.STRONG, is_call=True)
    cue = Cue.STRONG if calls_by_text(block, tools) else cue_of(before)
    if cue < Cue.LIKELY or words().example.search(paragraph):
        cue = Cue.NONE
    elif language not in SHELLS and not words().runs.search(paragraph):
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
