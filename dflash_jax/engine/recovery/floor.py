"""What an end token below the floor becomes: itself, the next best token, or a tool call."""

import enum

from dflash_jax.engine.recovery.settings import ROOM_FOR_CALL, Recovery
from dflash_jax.engine.recovery.words import Ids, Words

LOOK_BACK = 32  # ids whose text shows whether a preamble was the last thing said
ID_LOOK_BACK = 17
SKIP_LOOK_BACK = 64
MARKDOWN = "*_` \t\r\n"
COLONS = (":", "\N{FULLWIDTH COLON}")


class Verdict(enum.Enum):
    """What to do with an end token."""

    HONOUR = "honour"
    REPLACE = "replace"
    INJECT = "inject"
    WAIVE = "waive"  # honour: a stall, but no room is left for a call


def judge(
    ids: Ids, *, injected: bool, max_tokens: int, recovery: Recovery, words: Words
) -> Verdict:
    """Decides about an end token that would follow these output ids.

    Args:
      injected: whether a call was already begun for this request; one is enough.
    """
    floor = min(recovery.floor, max_tokens)
    if len(ids) >= floor:
        return Verdict.HONOUR
    if words.thinking(ids) and not recovery.floor_in_thought:
        return Verdict.HONOUR
    if recovery.tool_prefix and words.calls and not injected and is_stalled(ids, recovery, words):
        room = max_tokens - len(ids)
        enough = room >= max(map(len, words.calls)) + ROOM_FOR_CALL
        return Verdict.INJECT if enough else Verdict.WAIVE
    match recovery.below_floor:
        case "replace":
            return Verdict.REPLACE
        case "rescue":
            return Verdict.HONOUR if words.is_visible(ids) else Verdict.REPLACE
        case "compat":
            return Verdict.HONOUR


def is_stalled(ids: Ids, recovery: Recovery, words: Words) -> bool:
    """Whether an output that ends here announces an action and takes none."""
    by_ids = recovery.below_floor == "compat"
    ends = (
        ends_on_colon_id(ids, words.colons)
        if by_ids
        else ends_on_colon(words.text(ids[-LOOK_BACK:]))
    )
    return ends and not just_said(ids, words.skip) and not words.has_called(ids)


def ends_on_colon(text: str) -> bool:
    """Whether the last thing said, markdown aside, is a colon."""
    return text.rstrip(MARKDOWN).endswith(COLONS)


def ends_on_colon_id(ids: Ids, colons: frozenset[int]) -> bool:
    """The original engines' test: a colon's id among the last 17."""
    return any(i in colons for i in ids[-ID_LOOK_BACK:])


def just_said(ids: Ids, phrase: Ids) -> bool:
    """Whether the phrase ends within the last 64 ids."""
    if not phrase:
        return False
    first = max(len(phrase), len(ids) - SKIP_LOOK_BACK)
    return any(ids[end - len(phrase) : end] == phrase for end in range(first, len(ids) + 1))
