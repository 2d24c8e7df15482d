"""How a language announces the speaker's own next step.

Each language has regular expressions of a sentence in lower case, without quotations:

* `future`: the first person and the near future, such as "let me" or "I'll", up to the verb, which
  may be one that is not known;
* `opens`: other beginnings, such as "now I", after which only known verbs count;
* `acts`: verbs of actions that tools take, such as reading, running and changing;
* `idle`: what the speaker may promise without taking an action, such as waiting or explaining;
* `asks`: conditions and requests, such as "if you want" or "once you confirm": the sentence leaves
  the next step to the reader.

Languages without spaces, and those that put the person into the ending of the verb, have an
expression of whole announcements instead.
"""

import re
from typing import NamedTuple


class Language(NamedTuple):
    """The expressions of a language; None matches nothing."""

    future: re.Pattern[str] | None
    opens: re.Pattern[str] | None
    acts: re.Pattern[str]
    idle: re.Pattern[str]
    asks: re.Pattern[str]
    whole: re.Pattern[str] | None = None


def language(
    *, acts: str, idle: str, asks: str, future: str = "", opens: str = "", whole: str = ""
) -> Language:
    """Return a language; an empty expression matches nothing."""
    start = "(?<![\\w'-])"
    begins = re.compile(rf"{start}(?:{future})(?![a-zà-ÿа-я])\s*") if future else None
    others = re.compile(rf"{start}(?:{opens})\s*") if opens else None
    rest = re.compile(acts), re.compile(idle), re.compile(asks)
    return Language(begins, others, *rest, whole=re.compile(whole) if whole else None)
