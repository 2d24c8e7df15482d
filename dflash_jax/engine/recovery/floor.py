"""What becomes of an end token: it ends the output, or recovery replaces it.

`judge_by_text` follows the original engines, whose rules consider end tokens below a minimum length
and the text only. `judge_by_odds` lets the target decide, by the odds it gives a tool call in place
of the end token.
"""

import enum

from dflash_jax.engine.recovery.endings import COLONS, Ending, read_ending
from dflash_jax.engine.recovery.request_state import Policy, State
from dflash_jax.engine.recovery.settings import ROOM_FOR_CALL, Recovery
from dflash_jax.engine.recovery.words import Ids, Words

LOOK_BACK = 32  # ids whose text shows whether the output ends in a preamble
ID_LOOK_BACK = 17
SKIP_LOOK_BACK = 64
MARKDOWN = "*_` \t\r\n"
ANNOUNCED, AMBIGUOUS = -3.0, 3.0  # added to `call_odds` after an announcement, and in doubt


class EndVerdict(enum.Enum):
    """What becomes of an end token."""

    HONOUR = "honour"
    REPLACE = "replace"
    INJECT = "inject"
    WAIVE = "waive"  # honour a stall, as there is no room for a call
    PROBE = "probe"  # force the text before a call, to see whether the target wants the call
    CLOSE = "close"  # close the open thought instead


def judge(ids: Ids, odds: float | None, state: State, policy: Policy) -> EndVerdict:
    """Return what becomes of an end token that would follow these output ids."""
    if not policy.recovery.floor:
        return EndVerdict.HONOUR
    if policy.recovery.below_floor == "odds":
        return judge_by_odds(ids, odds, state, policy)
    return judge_by_text(ids, state, policy)


def judge_by_text(ids: Ids, state: State, policy: Policy) -> EndVerdict:
    """Return the verdict of the original engines' rules."""
    recovery, words, max_tokens = policy.recovery, policy.words, policy.max_tokens
    if len(ids) >= min(recovery.floor, max_tokens):
        return EndVerdict.HONOUR
    if words.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.HONOUR
    may_inject = recovery.tool_prefix and words.calls and not state.injected
    if may_inject and is_stalled(ids, recovery, words):
        return EndVerdict.INJECT if has_room(ids, max_tokens, words) else EndVerdict.WAIVE
    rescues = recovery.below_floor == "rescue" and not words.is_visible(ids)
    replaces = rescues or recovery.below_floor == "replace"
    return EndVerdict.REPLACE if replaces else EndVerdict.HONOUR


def judge_by_odds(ids: Ids, odds: float | None, state: State, policy: Policy) -> EndVerdict:
    """Return the verdict by the target's own odds of a tool call.

    Args:
      odds: logit of the token that leads to a call minus that of the end token; None if the device
        does not report it: then only a colon makes a stall.
    """
    recovery, words, max_tokens = policy.recovery, policy.words, policy.max_tokens
    if words.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.CLOSE if words.close and not state.closed else EndVerdict.HONOUR
    below = len(ids) < min(recovery.floor, max_tokens)
    reading = words.read(ids)
    if not (reading.answered or reading.began):
        return EndVerdict.REPLACE if below else EndVerdict.HONOUR
    ending = read_ending(words.text(ids))
    if ending.opened_fence and not reading.called:
        return EndVerdict.REPLACE if len(ids) < max_tokens else EndVerdict.HONOUR
    may_inject = recovery.tool_prefix and words.calls and not state.injected
    if reading.began or not may_inject:
        return EndVerdict.HONOUR
    if odds is None:
        stalled = ending.colon and not ending.ambiguous
        verdict = EndVerdict.INJECT
    else:
        stalled = odds >= wanted_odds(ending, recovery)
        verdict = EndVerdict.PROBE if len(words.opening) > 1 else EndVerdict.INJECT
    if not stalled or just_wrote(ids, words.skip):
        return EndVerdict.HONOUR
    return verdict if has_room(ids, max_tokens, words) else EndVerdict.WAIVE


def wanted_odds(ending: Ending, recovery: Recovery) -> float:
    """Return the least odds of a call, as a log-ratio, at which an end counts as a stall."""
    return recovery.call_odds + ANNOUNCED * ending.announces + AMBIGUOUS * ending.ambiguous


def has_room(ids: Ids, max_tokens: int, words: Words) -> bool:
    """Return whether a call of any declared tool, with some arguments, still fits."""
    return max_tokens - len(ids) >= max(map(len, words.calls)) + ROOM_FOR_CALL


def is_stalled(ids: Ids, recovery: Recovery, words: Words) -> bool:
    """Return whether an output that ends here announces an action without taking it."""
    if recovery.below_floor == "compat":  # a colon's id among the last, as the originals test
        ends = not words.colons.isdisjoint(ids[-ID_LOOK_BACK:])
    else:
        ends = ends_on_colon(words.text(ids[-LOOK_BACK:]))
    return ends and not just_wrote(ids, words.skip) and not words.read(ids).began


def ends_on_colon(text: str) -> bool:
    """Return whether a text ends in a colon, apart from markdown."""
    return text.rstrip(MARKDOWN).endswith(COLONS)


def just_wrote(ids: Ids, phrase: Ids) -> bool:
    """Return whether a phrase ends within the last 64 ids."""
    if not phrase:
        return False
    first = max(len(phrase), len(ids) - SKIP_LOOK_BACK)
    return any(ids[end - len(phrase) : end] == phrase for end in range(first, len(ids) + 1))
