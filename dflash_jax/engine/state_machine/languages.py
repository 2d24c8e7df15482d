"""How languages announce the speaker's own next step, by the expressions in `languages.toml`.

Each language has regular expressions of a sentence in lower case, without quotations:

* `future`: the first person and the near future, such as "let me" or "I'll", up to the verb, which
  may be one that is not known;
* `opens`: other beginnings, such as "now I", after which only known verbs count;
* `acts`: verbs of actions that tools take, such as reading, running and changing;
* `idle`: what the speaker may promise without taking an action, such as waiting or explaining;
* `asks`: conditions and requests, such as "if you want" or "once you confirm": the sentence leaves
  the next step to the reader.

Languages without spaces, and those that put the person into the ending of the verb, have an
expression of `whole` announcements instead. `words` has further expressions, of all languages. They
are compiled when a text is first read: few requests need them, and they take a tenth of a second.
"""

import functools
import importlib.resources
import re
import tomllib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

PART = re.compile(r"\{([a-z_]+)\}")
SHARED = ("parts", "words")  # tables that are no languages


class Language(NamedTuple):
    """The expressions of a language; None matches nothing."""

    future: re.Pattern[str] | None
    opens: re.Pattern[str] | None
    acts: re.Pattern[str]
    idle: re.Pattern[str]
    asks: re.Pattern[str]
    whole: re.Pattern[str] | None


def _language(fields: Mapping[str, str]) -> Language:
    """Return a language.

    Args:
      fields: its expressions, and the parts that these refer to.
    """

    def expression(name: str) -> str:
        text = "".join(fields[name].splitlines())
        return PART.sub(lambda part: expression(part[1]), text)

    def compiled(name: str, form: str = "{}") -> Any:
        return re.compile(form.format(expression(name))) if name in fields else None

    return Language(
        future=compiled("future", r"(?<![\w'-])(?:{})(?![a-zà-ÿа-я])\s*"),
        opens=compiled("opens", r"(?<![\w'-])(?:{})\s*"),
        acts=compiled("acts"),
        idle=compiled("idle"),
        asks=compiled("asks"),
        whole=compiled("whole"),
    )


@functools.cache
def languages() -> Mapping[str, Language]:
    """Return all languages by name."""
    parts = _read()["parts"]
    own = {name: fields for name, fields in _read().items() if name not in SHARED}
    return {name: _language(parts | fields) for name, fields in own.items()}


def english() -> Language:
    """Return the language of the rules that hold for English alone."""
    return languages()["english"]


@functools.cache
def expressions() -> Any:
    """Return the expressions that belong to no language, as attributes."""
    texts = _read()["words"]
    compiled = {name: re.compile("".join(text.splitlines())) for name, text in texts.items()}
    return types.SimpleNamespace(**compiled)


@functools.cache
def _read() -> dict[str, Any]:
    folder = importlib.resources.files("dflash_jax.engine.state_machine")
    return tomllib.loads(folder.joinpath("languages.toml").read_text(encoding="utf-8"))
