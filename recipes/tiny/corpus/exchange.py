"""The value types that the conversation makers produce. Plain data, no randomness and no text."""

import dataclasses
import hashlib
import random
from collections.abc import Callable

HELD_OUT_SHARE = 16


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


def is_held_out(text: str) -> bool:
    """True for the one text in `HELD_OUT_SHARE` that is kept out of training, chosen by hash."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0
