"""Read from a sentence whether the speaker announces an action of their own.

An announcement is a sentence in the first person about the near future ("let me", "I'll", "je
vais") with a verb of an action that a tool can take. Sentences that leave the next step to the
reader, by a condition or a question, announce nothing; promises to wait or to explain do not
either. `languages` has the words of each language.
"""

import enum
import re

from dflash_jax.engine.state_machine.languages import ENGLISH, FILLER, LANGUAGES, Language


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
# "Check if it works" sets no condition, and "so that you can see it" asks for nothing.
WHETHER = re.compile(
    r"\b((?:check|see|verif|test|confirm|determin|find out|figure out|ensure|look|make sure"
    r"|vérifi|voir|regard|contrôl|comprob|comprueb|ver\b|mir|revis|confer|checar|olh|controll"
    r"|ved|guard|prov)\w*(?: \w+){0,2}) (?:if|si|se)\b"
    r"(?! (?:you (?:want|like|wish|need)|you'd|tu|vous|quieres?|quiser|vuo))|م?ما إذا"
)
WAITING = re.compile(
    r"\b(?:wait|hold on|moment|second|sec|minute|bear with me|stand by)\b.{0,12}?\bwhile i(?:'m)? "
)
RESULT = re.compile(r":\s+(?:yes\b|no\b|.*=)")  # "Let me check: yes, it is there."
PURPOSE = re.compile(r",? so (?:that )?you\b.*")
# Where a clause ends that a negation may belong to: "I see why it does not work".
CLAUSE = re.compile(
    r"[,;:\u060c\uff0c\u3001]|\b(?:warum|wieso|weshalb|ob|dass|was|wie|wo|pourquoi|comment|où"
    r"|por qué|porqué|porque|cómo|qué|dónde|por que|como|onde|o que|perché|come|cosa|dove"
    r"|waarom|hoe|wat|waar|of|varför|hvorfor|om|hur|hvordan|vad|hvad|hva|var|hvor|ce qui|ce que"
    r"|si|se|why|что|почему|как|где|dlaczego|czy|co|jak|gdzie|neden|tại sao|vì sao|xem|kenapa"
    r"|mengapa|apakah|लेकिन|कि)\b|为什么|為什麼|怎么|哪|什么|لماذا|كيف"
)
# Words before the announcement of a sentence: "Ok, now let me ...".
LEAD_INS = re.compile(
    r"^(?:(?:ok|okay|alright|all right|sure(?: thing)?|great|good|perfect|now|next(?: up)?|first"
    r"|then|so|and|but|up next|starting with|first up|here goes|no problem|will do|on it"
    r"|got it|understood|right|well|hmm|oh|ah|yes|no|hm|thanks|absolutely|of course|certainly"
    r"|meanwhile|finally|lastly|also|afterwards|in parallel|step \d+|before (?:that|anything else)"
    r"|for (?:that|this|now)|to be sure|to start|to begin|from here|here|instead|still|today)\b"
    r"[\s,.!:-]*)+"
)
ADVERBS = re.compile(
    r"^(?:(?:quickly|just|first|now|also|then|next|actually|briefly|simply|try(?:ing)? to|come"
    r"|go(?! through| over| ahead| back| to| and)|start(?:ing)? by|begin(?:ning)? by) )+"
)
GERUND = re.compile(
    r"^(?:re-?)?[a-z]{2,}ing\b(?! (?:is|was|that|to)\b)(?=.* (?:an?|the|this|that|these|those|my"
    r"|your|our|its|it|them|all|both|each|every|another|now|again)\b|.*`"
    r"|(?: up)? (?:for|into|through|at) )"
    r"|^(?:now|next|first|then|currently|still|quickly) (?:re-?)?[a-z]{2,}ing\b"
    r"(?! (?:is|was|that|to)\b)"
)
FINITE = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|will|would|can|could|may|might|should|must|does|do"
    r"|did|takes?|took|needs?|gives?|gave|shows?|showed|fails?|failed|works?|worked|helps?|means?"
    r"|makes?|made|returns?|returned|requires?|seems?|looks?|keeps?|fixes|solves|lets|allows?"
    r"|causes?|leads?|saves|avoids?|ensures?|prevents?|stops|found|succeeded|completed|done"
    r"|\w+ed)\b"
)
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
        if cue >= Cue.LIKELY or not FILLER.match(sentence):
            return cue
        last = Cue.WEAK
    return last


def _cue(sentence: str) -> Cue:
    sentence = PURPOSE.sub("", WHETHER.sub(r"\1 whether", sentence[-LONGEST:]))
    sentence = WAITING.sub(", let me ", sentence)
    told = sentence.partition(": ")[2]
    if RESULT.search(sentence) or FINITE.search(told):
        return Cue.NONE
    found = max(_announces(sentence, language) for language in LANGUAGES)
    if found is Cue.NONE and not ENGLISH.asks.search(sentence):
        start = LEAD_INS.sub("", sentence)
        begins = GERUND.match(start) or GERUND.match(sentence)
        if begins and not FINITE.search(start) and len(start.split()) <= SHORT:
            verb = ADVERBS.sub("", start)
            return Cue.STRONG if ENGLISH.acts.match(verb) and not _idle(verb, ENGLISH) else found
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
            if language is ENGLISH:
                if not _begins_clause(sentence[: opening.start()]):
                    continue
                rest = ADVERBS.sub("", sentence[opening.end() :])
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
    end = CLAUSE.search(sentence, verb)
    return sentence[begin : end.start() if end else None]


def _idle(rest: str, language: Language) -> bool:
    return bool(language.idle.match(rest))


def _begins_clause(before: str) -> bool:
    """Return whether a clause may begin after a text: "The log is empty, so", "Done:"."""
    clause = PARTS.split(before)[-1]
    return not LEAD_INS.sub("", clause.strip() + " ").strip()
