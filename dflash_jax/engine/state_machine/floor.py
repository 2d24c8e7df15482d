"""What becomes of an end token: it ends the output, or recovery replaces it or forces a call.

`judge_by_text` follows the original engines, whose rules consider end tokens below a minimum length
and the text only. `judge_by_odds` needs two signs of a stall: the output announces an action, and
the target confirms it by the odds it gives a tool call in place of the end token.
"""

import enum
import math

from dflash_jax.engine.state_machine import call_retry
from dflash_jax.engine.state_machine.announcements import COLONS, Cue, Ending, read_ending
from dflash_jax.engine.state_machine.request_state import (
    CallProbe,
    Finish,
    Policy,
    State,
    StepCut,
    TokenIds,
)
from dflash_jax.engine.state_machine.settings import ROOM_FOR_CALL, Recovery
from dflash_jax.engine.state_machine.words import Ids, Words, calls_after, split_names

LOOK_BACK = 32  # ids whose text shows whether the output ends in a preamble
ID_LOOK_BACK = 17
SKIP_LOOK_BACK = 64
MARKDOWN = "*_` \t\r\n"
# Added to `call_odds` by the cue at the end, and in doubt. Without a cue, no odds suffice.
BARS = {Cue.NONE: math.inf, Cue.WEAK: -3.0, Cue.LIKELY: -8.0, Cue.STRONG: -20.0}
AMBIGUOUS = 3.0


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
    """Return the verdict by the cue at the end and the target's own odds of a tool call.

    Args:
      odds: logit of the token that leads to a call minus that of the end token; None if the device
        does not report it: then the text alone decides.
    """
    recovery, words, max_tokens = policy.recovery, policy.words, policy.max_tokens
    if words.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.CLOSE if words.close and not state.closed else EndVerdict.HONOUR
    below = len(ids) < min(recovery.floor, max_tokens)
    reading = words.read(ids)
    if not (reading.answered or reading.began):
        return EndVerdict.REPLACE if below else EndVerdict.HONOUR
    text = words.text(ids)
    ending = read_ending(text, words.tools)
    if ending.opened_fence and not reading.called:
        return EndVerdict.REPLACE if len(ids) < max_tokens else EndVerdict.HONOUR
    may_inject = recovery.tool_prefix and words.calls and not state.injected
    if reading.began or not may_inject:
        return EndVerdict.HONOUR
    verdict = EndVerdict.INJECT
    if ending.is_call:
        stalled = True
    elif odds is None:
        stalled = stalls_by_text(ending)
    else:
        stalled = odds >= wanted_odds(ending, recovery)
        if len(words.opening) > words.lead:
            verdict = EndVerdict.PROBE
    if not stalled or is_complete(text, recovery):
        return EndVerdict.HONOUR
    return verdict if has_room(ids, max_tokens, words) else EndVerdict.WAIVE


def stalls_by_text(ending: Ending) -> bool:
    """Return whether an end is a stall where the device does not report odds."""
    return (ending.colon or ending.cue >= Cue.LIKELY) and not ending.ambiguous


def wanted_odds(ending: Ending, recovery: Recovery) -> float:
    """Return the least odds of a call, as a log-ratio, at which an end counts as a stall."""
    return recovery.call_odds + BARS[ending.cue] + AMBIGUOUS * ending.ambiguous


def has_room(ids: Ids, max_tokens: int, words: Words) -> bool:
    """Return whether a call of any declared tool, with some arguments, still fits."""
    return max_tokens - len(ids) >= max(map(len, words.calls)) + ROOM_FOR_CALL


def is_stalled(ids: Ids, recovery: Recovery, words: Words) -> bool:
    """Return whether an output that ends here announces an action without taking it."""
    if recovery.below_floor == "compat":  # a colon's id among the last, as the originals test
        ends = not words.colons.isdisjoint(ids[-ID_LOOK_BACK:])
        skip, text = recovery.skip_phrase, words.text(ids)
        before = len(text) - len(words.text(ids[-SKIP_LOOK_BACK:]))
        complete = bool(skip) and skip in text[max(before - len(skip), 0) :]
    else:
        text = words.text(ids[-LOOK_BACK:])
        ends, complete = ends_on_colon(text), is_complete(text, recovery)
    return ends and not complete and not words.read(ids).began


def ends_on_colon(text: str) -> bool:
    """Return whether a text ends in a colon, apart from markdown."""
    return text.rstrip(MARKDOWN).endswith(COLONS)


def is_complete(text: str, recovery: Recovery) -> bool:
    """Return whether a text ends in the skip phrase, apart from punctuation."""
    end = len(text)
    while end and not text[end - 1].isalnum():
        end -= 1
    return bool(recovery.skip_phrase) and text.endswith(recovery.skip_phrase, 0, end)


# Begin a tool call for a stalled output: whether the target wants one, and of which tool.


def begin_call(cut: StepCut, policy: Policy) -> None:
    """Force the beginning of a tool call in place of an end token, up to where names differ."""
    first = policy.words.calls[0][:1]
    shared, rest = split_names([ids for ids in policy.words.calls if ids[:1] == first])
    cut.mark(injected=True, calls=rest)
    cut.force_tokens(shared, "tool_prefix")
    call_retry.watch_forced(cut, policy)
    cut.end_at_stop(policy)


def probe(cut: StepCut, end: int, odds: float | None, policy: Policy) -> None:
    """Force the text that leads to a tool call, to read the odds of a call after it."""
    words = policy.words
    lead = words.opening[: words.lead]
    ending = read_ending(words.text(cut.ids), words.tools)
    wanted = wanted_odds(ending, policy.recovery)
    call_probe = CallProbe(end, len(lead), odds or 0.0, wanted)
    cut.mark(probe=call_probe, calls=tuple(ids[len(lead) :] for ids in words.calls))
    cut.new += lead
    cut.replace, cut.force = lead[0], lead[1:]


def accepts_call(cut: StepCut, token: int, odds: float | None, policy: Policy) -> bool:
    """Evaluate the odds of a marker's token: return True once the whole marker is accepted.

    Until then, either force that token, to read the odds of the next one, or restore the end token
    as soon as the sum of the odds is too small.
    """
    probed, opening = cut.state.probe, policy.words.opening
    assert probed is not None
    if odds is not None and probed.odds + odds >= probed.wanted:
        if probed.lead + 1 == len(opening):
            cut.mark(probe=None, injected=True)
            cut.note("tool_prefix")
            return True
        marker = opening[probed.lead]
        further = probed._replace(lead=probed.lead + 1, odds=probed.odds + odds)
        cut.mark(probe=further, calls=tuple(ids[1:] for ids in cut.state.calls))
        cut.new.append(marker)
        cut.replace = None if marker == token else marker
        return False
    state, cut.retract = cut.state, probed.lead
    ids = TokenIds(state.ids[: len(state.ids) - probed.lead])
    cut.mark(probe=None, calls=(), ids=ids, held=state.held - probed.lead)
    cut.before -= probed.lead
    cut.new.append(probed.end)
    cut.end(Finish.STOP)
    return False


def name_tool(cut: StepCut, token: int, best: int, policy: Policy) -> None:
    """Choose the tool of a forced call, and force the ids that follow from the choice.

    Args:
      token: the target's own choice; used if it continues a declared name.
      best: the target's best token among those that continue a declared name.
    """
    calls = cut.state.calls
    known = {ids[0] for ids in calls}
    chosen = next(i for i in (token, best, calls[0][0]) if i in known)
    shared, rest = split_names(calls_after(calls, chosen))
    cut.mark(calls=rest)
    cut.new += (chosen, *shared)
    cut.replace, cut.force = None if chosen == token else chosen, shared
    call_retry.watch_forced(cut, policy)
    cut.end_at_stop(policy)
