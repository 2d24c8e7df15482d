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

from dflash_jax.engine.state_machine.languages import Language, english, expressions, languages
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
# Most words of a sentence such as "Reading the file now.". In a longer one, that is the subject.
SHORT = 7
LONGEST = 400  # most characters of a sentence that are read, from its end


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
        if cue >= Cue.LIKELY or not expressions().filler.match(sentence):
            return cue
        last = Cue.WEAK
    return last


def _cue(sentence: str) -> Cue:
    """Return how clearly a sentence announces an action, in any language."""
    sentence = PURPOSE.sub("", expressions().whether.sub(r"\1 whether", sentence[-LONGEST:]))
    sentence = expressions().waiting.sub(", let me ", sentence)
    told = sentence.partition(": ")[2]
    if RESULT.search(sentence) or expressions().finite.search(told):
        return Cue.NONE
    cue = max(_announces(sentence, language) for language in languages().values())
    if cue is Cue.NONE and _begins_to_act(sentence):
        return Cue.STRONG
    return cue


def _begins_to_act(sentence: str) -> bool:
    """Return whether a short English sentence is an action, such as "Reading the file now."."""
    if english().asks.search(sentence):
        return False
    start = expressions().lead_ins.sub("", sentence)
    gerund = expressions().gerund
    if not gerund.match(start) and not gerund.match(sentence):
        return False
    if expressions().finite.search(start) or len(start.split()) > SHORT:
        return False
    verb = expressions().adverbs.sub("", start)
    return bool(english().acts.match(verb)) and not _idle(verb, english())


def _announces(sentence: str, language: Language) -> Cue:
    """Return how clearly a sentence announces an action in a language."""
    if language.asks.search(sentence):
        return Cue.NONE
    if language.whole is not None:
        whole = language.whole.search(sentence)
        if whole and not language.idle.search(_clause(sentence, whole.start(), whole.start())):
            return Cue.STRONG if language.acts.search(sentence) else Cue.LIKELY
    cue = Cue.NONE
    for pattern in (language.future, language.opens):
        for opening in pattern.finditer(sentence) if pattern else ():
            if language is english():
                cue = max(cue, _cue_of_english(sentence, opening))
            else:
                known_only = pattern is language.opens
                cue = max(cue, _cue_of_opening(sentence, opening, language, known_only=known_only))
    return cue


def _cue_of_english(sentence: str, opening: re.Match[str]) -> Cue:
    """Return the cue of an English sentence by what follows an opening such as "let me"."""
    clause = PARTS.split(sentence[: opening.start()])[-1]  # "The log is empty, so"
    if expressions().lead_ins.sub("", clause.strip() + " ").strip():
        return Cue.NONE  # no clause begins here
    rest = expressions().adverbs.sub("", sentence[opening.end() :])
    if _idle(rest, english()):
        return Cue.NONE
    return Cue.STRONG if english().acts.match(rest) else Cue.LIKELY


def _cue_of_opening(
    sentence: str, opening: re.Match[str], language: Language, *, known_only: bool
) -> Cue:
    """Return the cue of a sentence by the verb after an opening of a language.

    Args:
      known_only: whether only the verbs of known actions count after the opening.
    """
    act = language.acts.search(sentence, opening.start())
    if act is None and known_only:
        return Cue.NONE
    end = act.end() if act else opening.end()
    if language.idle.search(_clause(sentence, opening.start(), end)):
        return Cue.NONE
    return Cue.STRONG if act else Cue.LIKELY


def _clause(sentence: str, start: int, verb: int) -> str:
    """Return the clause of a sentence that has a verb.

    Args:
      start: index of the verb's subject. Words before it belong to the clause unless a comma
        separates them.
      verb: index at which the verb ends.
    """
    begin = max(sentence.rfind(mark, 0, start) for mark in ",;:\u060c\uff0c\u3001") + 1
    end = expressions().clause.search(sentence, verb)
    return sentence[begin : end.start() if end else None]


def _idle(rest: str, language: Language) -> bool:
    return bool(language.idle.match(rest))


# The rest reads from the end of an output's text whether it announces an action.
#
# Without such a cue, an end token always ends the output. With one, `floor.py` lets the target
# confirm it by the margin of a tool call: the clearer the cue, the smaller margin suffices.


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
LOOK_BACK = 4000  # most characters that are read of the last paragraphs
# Keys of calls in JSON, in the forms in which models write them.
OF_NAMES = ("name", "tool", "tool_name", "function")
OF_ARGUMENTS = ("arguments", "parameters", "args", "input")
CALL_KEYS = {"type", "id", *OF_NAMES, *OF_ARGUMENTS}


@dataclasses.dataclass(frozen=True)
class Ending:
    """Cues at the end of an output."""

    cue: Cue = Cue.NONE  # how clearly it announces an action
    # Whether its last punctuation has a colon that is not of code, a quotation or a smiley.
    colon: bool = False
    ambiguous: bool = False  # whether its last paragraph asks a question, or it ends inside code
    opened_fence: bool = False  # whether it ends with an opening code fence
    is_call: bool = False  # whether it ends with a JSON object in a fence that calls a tool


def read_ending(text: str, tools: Sequence[Tool] = ()) -> Ending:
    """Return the cues at the end of an output's text."""
    fences = list(FENCE.finditer(text))
    if not fences:
        return _after_prose(text[-LOOK_BACK:], tools)
    last = fences[-1]
    rest = text[last.end() :]
    in_fence = len(fences) % 2 == 1
    if in_fence and not rest.strip():
        return Ending(cue_of(text[: last.start()]), ambiguous=True, opened_fence=True)
    if in_fence:
        return _after_code(text, last, rest, tools, in_fence=True)
    if rest.strip():
        return _after_prose(rest[-LOOK_BACK:], tools)
    opening = fences[-2]
    return _after_code(text, opening, text[opening.end() : last.start()], tools, in_fence=False)


def _after_code(
    text: str, opening: re.Match[str], block: str, tools: Sequence[Tool], *, in_fence: bool
) -> Ending:
    """Return the cues of an output that ends with a code block.

    Args:
      opening: the line that opens the block.
      block: the code.
      in_fence: whether the block is still open.
    """
    language = opening[0].strip("`~ \t").lower()
    before = text[: opening.start()].rstrip()[-LOOK_BACK:]
    paragraph = _last_paragraph(before)
    asks = any(mark in paragraph for mark in QUESTIONS)
    if _is_call(block, tools) and introduces_call(before):
        return Ending(Cue.STRONG, is_call=True)
    cue = Cue.STRONG if calls_by_text(block, tools) else cue_of(before)
    if cue < Cue.LIKELY or expressions().example.search(paragraph):
        cue = Cue.NONE
    elif language not in SHELLS and not expressions().runs.search(paragraph):
        cue = Cue.NONE  # the block is what was announced: "I'll write a function:"
    return Ending(cue, ambiguous=in_fence or asks)


def introduces_call(before: str) -> bool:
    """Return whether a call in a code fence after a text is meant as one, and not as an example."""
    paragraph = _last_paragraph(before)
    asks = any(mark in paragraph for mark in QUESTIONS)
    return not asks and not expressions().example.search(paragraph)


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
    """Return whether a text is a JSON object of a declared tool's name and its arguments.

    With further keys, such as "response", it is a report of a call that was made.
    """
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return False
    inner = call.get("function") if isinstance(call, dict) else None
    objects = [call, inner] if isinstance(inner, dict) else [call]
    if not all(isinstance(each, dict) and each.keys() <= CALL_KEYS for each in objects):
        return False
    call = objects[-1]
    name = next((call[key] for key in OF_NAMES if key in call), None)
    arguments = next((call[key] for key in OF_ARGUMENTS if key in call), {})
    return isinstance(arguments, dict | str) and any(tool.name == name for tool in tools)


def _last_paragraph(text: str) -> str:
    return re.split(r"\n\s*\n", text.strip())[-1]


def _after_prose(text: str, tools: Sequence[Tool]) -> Ending:
    """Return the cues of an output that ends with prose."""
    paragraph = _last_paragraph(text)
    if calls_by_text(paragraph, tools):
        return Ending(Cue.STRONG)
    line = text.strip().rpartition("\n")[2]
    in_code = line.count("`") % 2 == 1
    ambiguous = in_code or any(mark in paragraph for mark in QUESTIONS)
    # The run of characters at the end that are neither letters nor digits.
    start = len(line)
    while start and not line[start - 1].isalnum():
        start -= 1
    trailing = line[start:]
    has_colon = _has_colon(line, trailing)
    cue = Cue.NONE if in_code else _cue_of_prose(paragraph, line)
    if has_colon or _trails_off(line, trailing, in_code=in_code):
        cue = max(cue, Cue.WEAK)
    return Ending(cue, has_colon, ambiguous)


def _has_colon(line: str, trailing: str) -> bool:
    """Return whether the last punctuation of a line has a colon that announces something."""
    colon = max(trailing.rfind(mark) for mark in COLONS)
    if colon < 0 or SMILEY.search(line):
        return False
    before = line[: len(line) - len(trailing) + colon]
    return not _is_quoted(before)


def _trails_off(line: str, trailing: str, *, in_code: bool) -> bool:
    """Return whether a line ends with a dash or has an ellipsis in its last punctuation."""
    if line in ELLIPSES + DASHES:
        return True
    if in_code or RULE.fullmatch(line):
        return False
    visible = "".join(c for c in trailing if c.isprintable()).rstrip(" *_")
    return visible.endswith(DASHES) or any(mark in trailing for mark in ELLIPSES)


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
