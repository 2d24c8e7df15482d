"""What an end token becomes: itself, the next best token, or the beginning of a tool call.

`judge` follows the original engines: their rules look at end tokens below a floor, and at text
alone. `judge_by_odds` lets the target decide, by the odds it gives a tool call at the place of the
end token.
"""

import enum

from dflash_jax.engine.recovery.endings import Ending, read_ending
from dflash_jax.engine.recovery.settings import ROOM_FOR_CALL, Recovery
from dflash_jax.engine.recovery.words import Ids, Words

LOOK_BACK = 32  # ids whose text shows whether a preamble was the last thing said
ID_LOOK_BACK = 17
SKIP_LOOK_BACK = 64
MARKDOWN = "*_` \t\r\n"
COLONS = (":", "\N{FULLWIDTH COLON}")
ANNOUNCED, DOUBTFUL = -3.0, 3.0  # what an announcement, or a doubt, adds to `Recovery.call_odds`


class EndVerdict(enum.Enum):
    """What to do with an end token."""

    HONOUR = "honour"
    REPLACE = "replace"
    INJECT = "inject"
    WAIVE = "waive"  # honour: a stall, but no room is left for a call
    PROBE = "probe"  # force what a family writes before a call, to see whether the call follows
    CLOSE = "close"  # close the open thought instead


def judge(
    ids: Ids, *, injected: bool, max_tokens: int, recovery: Recovery, words: Words
) -> EndVerdict:
    """Decides about an end token that would follow these output ids.

    Args:
      injected: whether a call was already begun for this request; one is enough.
    """
    floor = min(recovery.floor, max_tokens)
    if len(ids) >= floor:
        return EndVerdict.HONOUR
    if words.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.HONOUR
    if recovery.tool_prefix and words.calls and not injected and is_stalled(ids, recovery, words):
        return EndVerdict.INJECT if has_room(ids, max_tokens, words) else EndVerdict.WAIVE
    match recovery.below_floor:
        case "replace":
            return EndVerdict.REPLACE
        case "rescue":
            return EndVerdict.HONOUR if words.is_visible(ids) else EndVerdict.REPLACE
        case _:  # "compat"
            return EndVerdict.HONOUR


def judge_by_odds(
    ids: Ids,
    odds: float | None,
    *,
    injected: bool,
    closed: bool,
    max_tokens: int,
    recovery: Recovery,
    words: Words,
) -> EndVerdict:
    """Decide about an end token that would follow these output ids, by the target's own odds.

    Args:
      odds: logit of the token that leads to a call minus that of the end token; None where the
        device does not report it: then a colon alone tells a stall.
      injected, closed: whether a call was begun, or a thought closed, for this request already.
    """
    if words.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.CLOSE if words.close and not closed else EndVerdict.HONOUR
    below = len(ids) < min(recovery.floor, max_tokens)
    said = words.read(ids)
    if not (said.answered or said.called or said.unfinished):
        return EndVerdict.REPLACE if below else EndVerdict.HONOUR
    ending = read_ending(words.text(ids))
    if ending.opened_fence and not said.called:
        return EndVerdict.REPLACE if len(ids) < max_tokens else EndVerdict.HONOUR
    if said.called or said.unfinished or injected or not (recovery.tool_prefix and words.calls):
        return EndVerdict.HONOUR
    if odds is None:
        stalled = ending.colon and not ending.doubtful
        verdict = EndVerdict.INJECT
    else:
        stalled = odds >= wanted_odds(ending, recovery)
        verdict = EndVerdict.PROBE if len(words.opening) > 1 else EndVerdict.INJECT
    if not stalled or just_said(ids, words.skip):
        return EndVerdict.HONOUR
    return verdict if has_room(ids, max_tokens, words) else EndVerdict.WAIVE


def wanted_odds(ending: Ending, recovery: Recovery) -> float:
    """Return the least odds of a call, as a log-ratio, at which an end counts as a stall."""
    moved = ANNOUNCED * ending.announces + DOUBTFUL * ending.doubtful
    return recovery.call_odds + moved


def has_room(ids: Ids, max_tokens: int, words: Words) -> bool:
    """Whether a forced call of any declared tool, and some arguments, still fit."""
    return max_tokens - len(ids) >= max(map(len, words.calls)) + ROOM_FOR_CALL


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
