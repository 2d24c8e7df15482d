"""What becomes of an end token: it ends the output, or recovery replaces it or forces a call.

A stall needs two signs: the output announces an action, and the target confirms it by the margin of
a tool call: the logit of the token that leads to one minus that of the end token.
"""

import enum
import math

from dflash_jax.engine.state_machine import call_retry
from dflash_jax.engine.state_machine.announcements import Cue, Ending, read_ending
from dflash_jax.engine.state_machine.forced_calls import calls_after, split_names
from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.engine.state_machine.request_state import (
    CallProbe,
    Finish,
    Policy,
    State,
    StepDecision,
    Stepped,
    TokenIds,
)
from dflash_jax.engine.state_machine.settings import ROOM_FOR_CALL, Recovery

# These are added to `tool_call_threshold`: one by the cue at the output's end, so that no margin
# suffices without a cue, and one more where the end is ambiguous.
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


def judge(ids: Ids, margin: float | None, state: State, policy: Policy) -> EndVerdict:
    """Return what becomes of an end token that would follow these output ids.

    Args:
      margin: logit of the token that leads to a call minus that of the end token. None if the
        device does not report it; then the text alone decides.
    """
    recovery = policy.recovery
    vocabulary = policy.vocabulary
    max_tokens = policy.max_tokens
    if not recovery.floor:
        return EndVerdict.HONOUR
    if policy.output.thinking(ids) and not recovery.floor_in_thought:
        return EndVerdict.CLOSE if vocabulary.close and not state.closed else EndVerdict.HONOUR
    below = len(ids) < min(recovery.floor, max_tokens)
    ended = policy.output.ended(ids)
    if not (ended.answered or ended.began):
        return EndVerdict.REPLACE if below else EndVerdict.HONOUR
    text = policy.output.text(ids)
    ending = read_ending(text, vocabulary.tools)
    if ending.opened_fence and not ended.called:
        return EndVerdict.REPLACE if len(ids) < max_tokens else EndVerdict.HONOUR
    may_inject = recovery.tool_prefix and vocabulary.calls and not state.injected
    if ended.began or not may_inject:
        return EndVerdict.HONOUR
    verdict = EndVerdict.INJECT
    if ending.is_call:
        stalled = True
    elif margin is None:
        stalled = stalls_by_text(ending)
    else:
        stalled = margin >= wanted_margin(ending, recovery)
        if len(vocabulary.opening) > vocabulary.lead:
            verdict = EndVerdict.PROBE
    if not stalled or is_complete(text, recovery):
        return EndVerdict.HONOUR
    return verdict if has_room(ids, max_tokens, vocabulary) else EndVerdict.WAIVE


def stalls_by_text(ending: Ending) -> bool:
    """Return whether an end is a stall where the device does not report the margin of a call."""
    return (ending.colon or ending.cue >= Cue.LIKELY) and not ending.ambiguous


def wanted_margin(ending: Ending, recovery: Recovery) -> float:
    """Return the least margin of a tool call at which an end counts as a stall."""
    margin = recovery.tool_call_threshold + BARS[ending.cue]
    if ending.ambiguous:
        margin += AMBIGUOUS
    return margin


def has_room(ids: Ids, max_tokens: int, vocabulary: OutputVocabulary) -> bool:
    """Return whether a call of any declared tool, with some arguments, still fits."""
    return max_tokens - len(ids) >= max(map(len, vocabulary.calls)) + ROOM_FOR_CALL


def is_complete(text: str, recovery: Recovery) -> bool:
    """Return whether a text ends in the skip phrase, apart from punctuation."""
    if not recovery.skip_phrase:
        return False
    end = len(text)
    while end and not text[end - 1].isalnum():
        end -= 1
    return text.endswith(recovery.skip_phrase, 0, end)


# The rest begins a tool call for a stalled output, if the target wants one.


def begin_call(decision: StepDecision, policy: Policy) -> None:
    """Force the beginning of a tool call in place of an end token, up to where names differ."""
    first = policy.vocabulary.calls[0][:1]
    shared, rest = split_names([ids for ids in policy.vocabulary.calls if ids[:1] == first])
    decision.mark(injected=True, calls=rest)
    decision.force_tokens(shared, "tool_prefix")
    call_retry.watch_forced(decision, policy)
    decision.end_at_stop(policy)


def probe(decision: StepDecision, margin: float | None, policy: Policy) -> None:
    """Force the text that leads to a tool call, to read the margin of a call after it."""
    vocabulary = policy.vocabulary
    lead = vocabulary.opening[: vocabulary.lead]
    ending = read_ending(policy.output.text(decision.ids), vocabulary.tools)
    call_probe = CallProbe(
        end=decision.token,
        lead=len(lead),
        margin=margin or 0.0,
        wanted_margin=wanted_margin(ending, policy.recovery),
    )
    decision.mark(probe=call_probe, calls=tuple(ids[len(lead) :] for ids in vocabulary.calls))
    decision.new += lead
    decision.replace = lead[0]
    decision.force = lead[1:]


def confirm_call(decision: StepDecision, step: Stepped, policy: Policy) -> bool:
    """Judge a probe by the margin of its next token; a rule.

    As long as the sum of the margins suffices, each token of the marker is forced, to read the
    margin of the next one. Once the whole marker is accepted, the call goes on. As soon as the sum
    is too small, the end token is restored.
    """
    probed = decision.state.probe
    if probed is None:
        return False
    margin = step.tool_call_margin
    opening = policy.vocabulary.opening
    if margin is None or not probed.margin + margin >= probed.wanted_margin:  # or it is NaN
        _restore_end(decision, probed)
        return True
    if probed.lead + 1 == len(opening):
        decision.mark(probe=None, injected=True)
        decision.note("tool_prefix")
        return False
    marker = opening[probed.lead]
    further = probed._replace(lead=probed.lead + 1, margin=probed.margin + margin)
    decision.mark(probe=further, calls=tuple(ids[1:] for ids in decision.state.calls))
    decision.new.append(marker)
    decision.replace = None if marker == decision.token else marker
    return True


def _restore_end(decision: StepDecision, probed: CallProbe) -> None:
    """Drop the lead of a probe, and end the output with the end token that it replaced."""
    state = decision.state
    decision.retract = probed.lead
    ids = TokenIds(state.ids[: len(state.ids) - probed.lead])
    decision.mark(probe=None, calls=(), ids=ids, held=state.held - probed.lead)
    decision.before -= probed.lead
    decision.new.append(probed.end)
    decision.end(Finish.STOP)


def choose_tool(decision: StepDecision, step: Stepped, policy: Policy) -> bool:
    """Choose the tool of a call that was begun, and force the ids that follow from it; a rule.

    The target's own token counts if it continues a declared name. Otherwise its best token that
    does so is taken.
    """
    calls = decision.state.calls
    if not calls:
        return False
    allowed = {ids[0] for ids in calls}
    wishes = (decision.token, step.replacement_token, calls[0][0])
    chosen = next(token for token in wishes if token in allowed)
    shared, rest = split_names(calls_after(calls, chosen))
    decision.mark(calls=rest)
    decision.new += (chosen, *shared)
    decision.replace = None if chosen == decision.token else chosen
    decision.force = shared
    call_retry.watch_forced(decision, policy)
    decision.end_at_stop(policy)
    return True


def judge_end(decision: StepDecision, step: Stepped, policy: Policy) -> bool:
    """Decide what becomes of an end token; a rule."""
    if decision.token not in policy.stop_ids:
        return False
    if call_retry.end_call(decision, policy):
        return True
    verdict = _verdict(decision, step.tool_call_margin, policy)
    match verdict:
        case EndVerdict.REPLACE:
            decision.token = step.replacement_token
            decision.replace = decision.token
            below_min = decision.length < policy.recovery.min_tokens
            decision.note("min_tokens" if below_min else "floor")
            return False
        case EndVerdict.INJECT:
            begin_call(decision, policy)
        case EndVerdict.PROBE:
            probe(decision, step.tool_call_margin, policy)
        case EndVerdict.CLOSE:
            close_thought(decision, policy)
        case EndVerdict.HONOUR | EndVerdict.WAIVE:
            if verdict is EndVerdict.WAIVE:
                decision.note("floor_waived")
            decision.new.append(decision.token)
            decision.end(Finish.STOP)
    return True


def _verdict(decision: StepDecision, margin: float | None, policy: Policy) -> EndVerdict:
    """Return what becomes of the end token of a decision."""
    if decision.state.guard is not None:
        return EndVerdict.HONOUR
    verdict = judge(decision.ids, margin, decision.state, policy)
    opening = policy.vocabulary.opening
    if verdict is EndVerdict.PROBE and not policy.stop_ids.isdisjoint(opening):
        verdict = EndVerdict.HONOUR  # the device would stop inside the lead
    ends = verdict in (EndVerdict.HONOUR, EndVerdict.WAIVE)
    if ends and decision.length < policy.recovery.min_tokens:
        return EndVerdict.REPLACE
    return verdict


def close_thought(decision: StepDecision, policy: Policy) -> None:
    """Replace the token by the sequence that closes the open thought."""
    close = policy.vocabulary.close[: policy.max_tokens - decision.length]
    decision.mark(closed=True)
    chose_to_close = decision.token == close[0]
    note = "thought_closed" if chose_to_close else "thought_closed_by_force"
    decision.force_tokens(close, note)
    decision.end_at_stop(policy)
    if decision.finish is None and decision.length >= policy.max_tokens:
        decision.end(Finish.LENGTH)
