"""The values that makers of conversations produce, and the small world that these talk about.

`facts.json` has its tables, and `phrases.json` the ways in which users ask.
"""

import dataclasses
import hashlib
import json
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELD_OUT_SHARE = 16


def _read(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


facts: Any = types.SimpleNamespace(**_read("facts.json"))
PHRASES: dict[str, list[str]] = _read("phrases.json")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One user message with the assistant's answer; `thought` is the reasoning shown before it."""

    user: str
    answer: str
    thought: str = ""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Chat messages in the OpenAI shape, with the tools that the system turn offers.

    `thinking=False` marks a conversation whose last answer follows an empty reasoning
    block, the form a chat template produces for `enable_thinking=False`.
    """

    messages: tuple[dict, ...]
    tools: tuple[dict, ...] = ()
    thinking: bool = True


Maker = Callable[[random.Random], Exchange]


def say(rng: random.Random, kind: str, *values: object) -> str:
    """Return a phrase of a kind, with these values in its places."""
    return rng.choice(PHRASES[kind]).format(*values)


def is_held_out(text: str) -> bool:
    """Return whether a text is kept out of training: one in `HELD_OUT_SHARE`, chosen by hash."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0
