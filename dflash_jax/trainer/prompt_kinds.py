"""Kinds of prompts: beginnings of user turns, and whole turns. `prompt_kinds.toml` has the text.

A template is text with slots: `{30-99}` is a number, `{topic}` a word list's entry, which may have
slots of its own. Slots with the same label, as in `{person.a}`, have the same value. The target
continues a template that ends with `CONTINUED`; the others are whole turns.
"""

import dataclasses
import itertools
import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import ConfigError

CONTINUED = "…"
FOLLOW_UP = "follow-up"  # the kind of a conversation's second user turn
SLOT = re.compile(r"\{([^{}]+)\}")
NUMBERS = re.compile(r"(\d+)-(\d+)")
SOURCE = Path(__file__).with_suffix(".toml")
_TABLES = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
KINDS: dict[str, list[str]] = _TABLES["kinds"]
WORDS: dict[str, list[str]] = _TABLES["words"]


@dataclasses.dataclass(frozen=True)
class Opening:
    """The beginning of a user turn, or a whole turn."""

    text: str = ""
    continued: bool = True  # whether the target continues it


def opening(kind: str, seed: int, key: str | int) -> Opening:
    """Return the opening that a seed and a key choose; an empty one without a kind."""
    if not kind:
        return Opening()
    rng = random.Random(f"opening {seed} {kind} {key}")
    text = _filled(rng.choice(KINDS[kind]), rng, {})
    return Opening(text.removesuffix(CONTINUED), text.endswith(CONTINUED))


def _filled(template: str, rng: random.Random, labelled: dict[str, str]) -> str:
    def value(slot: re.Match[str]) -> str:
        name, _, label = slot[1].partition(".")
        if slot[1] in labelled:
            return labelled[slot[1]]
        bounds = NUMBERS.fullmatch(name)
        if bounds:
            text = str(rng.randint(int(bounds[1]), int(bounds[2])))
        else:
            text = _filled(rng.choice(WORDS[name]), rng, labelled)
        return labelled.setdefault(slot[1], text) if label else text

    return SLOT.sub(value, template)


def check_mixture(mixture: Sequence[str]) -> None:
    """Raise ConfigError for entries that are not a known kind, a colon and a share above 0."""
    known = "|".join(KINDS.keys() - {FOLLOW_UP})
    names = [entry.partition(":")[0] for entry in mixture]
    for entry, name in zip(mixture, names, strict=True):
        if not re.fullmatch(rf"({known}):[1-9]\d{{0,5}}", entry) or names.count(name) > 1:
            raise ConfigError(
                f"mixture has {entry!r}; expected KIND:SHARE like chat:2,code:3, each kind once,"
                f" of {', '.join(k for k in KINDS if k != FOLLOW_UP)}"
            )


def counts(mixture: Sequence[str], total: int) -> dict[str, int]:
    """Return how many of `total` turns each kind has; all have no kind without a mixture."""
    entries = [entry.partition(":") for entry in mixture] or [("", ":", "1")]
    sums = [0, *itertools.accumulate(int(share) for _, _, share in entries)]
    ends = [round(total * x / sums[-1]) for x in sums]
    return {x[0]: b - a for x, (a, b) in zip(entries, itertools.pairwise(ends), strict=True)}
