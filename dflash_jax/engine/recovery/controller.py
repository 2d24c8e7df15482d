"""What one request does next: a pure function of its state and of what the device said.

    advance(state, event, policy) -> (state, effects)

No clock, no arrays, no I/O: time, disconnects and failures arrive as events, and a whole history
can be replayed in microseconds. The device has already cut every step at stop tokens and at the
row's limit (`room`), and a row that reached either is frozen until the host speaks. This machine
plans which of the decided tokens count, then says what to emit, to dictate or to end:

    WAITING --Prefilled--> SPECULATIVE <-> PLAIN --> DONE
                              |  RETRY: everything once more, without drafting
                              `- dictated tokens (a call's beginning, a thought's end) go on

Exactly one `Finish` leaves every request, after its last `emit`; nothing follows it. A token that
was emitted stays emitted. Between events exactly one decided token, the last, is not yet fed.
"""

from collections.abc import Sequence
from typing import assert_never

from dflash_jax.engine.recovery import (
    call_retry,
    floor,
    forced_calls,
    guards,
    speculation,
    tool_names,
)
from dflash_jax.engine.recovery.cut import StepCut
from dflash_jax.engine.recovery.floor import EndVerdict
from dflash_jax.engine.recovery.request_state import (
    CallRetried,
    Cancelled,
    Effects,
    Event,
    Finish,
    Ids,
    Phase,
    Policy,
    Prefilled,
    Restart,
    State,
    Stepped,
    TokenIds,
)


def advance(state: State, event: Event, policy: Policy) -> tuple[State, Effects]:
    """The next state of a request, and what to do about it."""
    if state.phase is Phase.DONE:
        return state, Effects()
    match event:
        case Cancelled(reason):
            dropped = _never_shown(state, reason)
            ids = TokenIds(state.ids[: len(state.ids) - dropped]) if dropped else state.ids
            rest = ids[len(ids) + dropped - state.held :]
            done = state._replace(phase=Phase.DONE, ids=ids, held=0, probe=None, call_at=-1)
            return done, Effects(emit=rest, finish=reason, retract=dropped)
        case CallRetried():
            dropped = len(state.ids) - state.call_at
            ids = TokenIds(state.ids[: state.call_at])
            memory = state.memory.shortened(len(ids))
            state = state._replace(ids=ids, held=0, fed=len(ids) - 1, guard=None, memory=memory)
            state = state._replace(call_at=-1, call_retried=True)
            notes, places = ("call_retry",), (len(ids),)
            return state, Effects(notes=notes, places=places, retract=dropped)
        case Prefilled():
            restored = state.restored if state.retried else event.restored
            state = state._replace(restored=restored, fed=-1)
            step = Stepped(
                (event.token,), event.finite, next_best=event.next_best, call_odds=event.call_odds
            )
            return _stepped(state, step, policy)
        case Stepped():
            return _stepped(state, event, policy)
        case _:
            assert_never(event)


def _never_shown(state: State, reason: Finish) -> int:
    """Return how many of the last ids no caller gets if the request ends from outside.

    A call that is held back may yet be decoded once more, so a cancelled output ends before it:
    whatever the caller got is the beginning of the whole output.
    """
    if state.probe:
        return state.probe.lead
    if state.call_at >= 0 and reason is Finish.CANCELLED:
        return len(state.ids) - state.call_at
    return 0


def speculates(state: State, policy: Policy) -> bool:
    """Whether the next step of this request should draft; one that chooses a name need not."""
    return policy.speculative and not state.retried and state.drafting.drafts and not state.calls


def is_visible(state: State, policy: Policy) -> bool:
    """Whether a caller sees anything of the output."""
    return _is_visible(state.ids, policy)


def _is_visible(ids: Sequence[int], policy: Policy) -> bool:
    ended = bool(ids) and ids[-1] in policy.stop_ids
    return policy.words.is_visible(ids[:-1] if ended else ids)


def room(state: State, policy: Policy) -> int:
    """Output tokens the device may decide in all before the host has to speak."""
    if state.calls:
        return min(state.num_decided + 1, policy.max_tokens)
    if policy.close_at is None or state.past_close:
        return policy.max_tokens
    return min(max(policy.close_at, state.num_decided) + 1, policy.max_tokens)


def choices(state: State) -> Ids:
    """Return the tokens of which the next step must report the best; most steps have none."""
    return tool_names.choices(state.calls)


def opening(state: State, policy: Policy) -> int:
    """Return the token whose odds the next step must report; -1 for none."""
    if state.probe:
        return policy.words.opening[-1]
    judges = policy.recovery.floor and policy.recovery.below_floor == "odds"
    return policy.words.opening[0] if judges and policy.words.opening else -1


def _stepped(state: State, event: Stepped, policy: Policy) -> tuple[State, Effects]:
    if not event.finite:
        return state._replace(phase=Phase.DONE), Effects(finish=Finish.ERROR)
    decided = len(event.tokens)
    ran = state.ran or speculates(state, policy)
    drafting, fallback = speculation.after_step(
        state.drafting,
        decided,
        event.num_drafts,
        finite=event.draft_finite,
        break_even=policy.break_even,
        fixed=policy.fixed,
    )
    died = drafting.dead and not state.drafting.dead
    state = state._replace(drafting=drafting, ran=ran, fed=state.fed + decided)
    if not decided:
        return state, Effects(fallback=fallback)
    cut = StepCut(state, before=len(state.ids))
    guard = guards.guard_of(
        state.memory, state.ids.last, len(state.ids), policy.recovery, policy.words
    )
    if policy.max_tokens <= 0:
        cut.finish = Finish.LENGTH
    elif died:
        cut.note(speculation.DEAD)
    for token in event.tokens:
        if cut.finish or _judge(cut, token, event, guard, policy):
            break
    if guard is not None:
        cut.mark(memory=guard.memory)
    return _settle(cut, policy, fallback)


def _judge(
    cut: StepCut, token: int, event: Stepped, guard: guards.Guard | None, policy: Policy
) -> bool:
    """Takes one decided token into the cut, or what stands in its place; True at the cut.

    Tokens are judged one by one, by the output so far alone: then every lane cuts alike (S6).
    """
    if cut.state.probe and not forced_calls.accepts_call(cut, event.call_odds):
        return True
    if cut.state.calls:
        forced_calls.name_tool(cut, token, event.next_best, policy)
        return True
    stop = token in policy.stop_ids
    if cut.state.guard is not None and not stop:
        cut.end(Finish.LENGTH)
        return True
    if not cut.state.past_close and policy.close_at is not None and cut.length >= policy.close_at:
        cut.mark(past_close=True)
        if policy.words.thinking(cut.ids):
            _close(cut, token, policy)
            return True
    if stop and cut.state.call_at >= 0 and cut.state.guard is None:
        call_retry.close(cut, policy)
        if cut.retry_call:
            cut.new.append(token)
            return True
    if stop:
        verdict = _at_end_token(cut, event.call_odds, policy)
        if verdict is EndVerdict.INJECT:
            forced_calls.begin_call(cut, policy)
            return True
        if verdict is EndVerdict.PROBE:
            forced_calls.probe(cut, token, event.call_odds, policy)
            return True
        if verdict is EndVerdict.CLOSE:
            _close(cut, token, policy)
            return True
        if verdict is not EndVerdict.REPLACE:
            if verdict is EndVerdict.WAIVE:
                cut.note("floor_waived")
            cut.new.append(token)
            cut.end(Finish.STOP)
            return True
        token = cut.replace = event.next_best
        cut.note("min_tokens" if _too_few(cut, policy) else "floor")
    cut.new.append(token)
    call_retry.watch(cut, policy)
    if cut.retry_call:
        return True
    if guard is not None and (kind := guard.take(token, cut.since, closed=cut.state.closed)):
        cut.mark(guard=kind)
    if cut.length >= policy.max_tokens:
        cut.end(Finish.LENGTH)
    return cut.finish is not None


def _at_end_token(cut: StepCut, odds: float | None, policy: Policy) -> EndVerdict:
    if cut.state.guard is not None:
        return EndVerdict.HONOUR
    verdict = EndVerdict.HONOUR
    if policy.recovery.floor and policy.recovery.below_floor == "odds":
        verdict = floor.judge_by_odds(
            cut.ids,
            odds,
            injected=cut.state.injected,
            closed=cut.state.closed,
            max_tokens=policy.max_tokens,
            recovery=policy.recovery,
            words=policy.words,
        )
    elif policy.recovery.floor:
        verdict = floor.judge(
            cut.ids,
            injected=cut.state.injected,
            max_tokens=policy.max_tokens,
            recovery=policy.recovery,
            words=policy.words,
        )
    if verdict is EndVerdict.PROBE and not policy.stop_ids.isdisjoint(policy.words.opening[:-1]):
        verdict = EndVerdict.HONOUR  # the device would stop at what leads to a call
    if _too_few(cut, policy) and verdict in (EndVerdict.HONOUR, EndVerdict.WAIVE):
        return EndVerdict.REPLACE
    return verdict


def _too_few(cut: StepCut, policy: Policy) -> bool:
    """Whether the output may not end yet, whatever it says."""
    return cut.length < policy.recovery.min_tokens


def _close(cut: StepCut, token: int, policy: Policy) -> None:
    """Ends an open thought in the place of the token, with the whole closing sequence."""
    close = policy.words.close[: policy.max_tokens - cut.length]
    cut.mark(closed=True)
    cut.force_tokens(close, "thought_closed" if token == close[0] else "thought_closed_by_force")
    cut.end_at_stop(policy)
    if cut.finish is None and cut.length >= policy.max_tokens:
        cut.end(Finish.LENGTH)


def _settle(cut: StepCut, policy: Policy, fallback: str | None) -> tuple[State, Effects]:
    """Turns the cut into the new state and its effects: hold, retry, emit, finish."""
    state, finish = cut.state, cut.finish
    ids = state.ids.extended(cut.new)
    may_retry = policy.recovery.empty_retry and _may_retry(state, policy)
    looks = may_retry or (finish is not None and state.retried)  # else nobody asks
    nothing = looks and not _is_visible(ids, policy)
    if finish and nothing and may_retry:
        return _retry(cut, fallback)
    if cut.retry_call:
        return _retry_call(cut, fallback)
    if finish and state.retried:
        cut.note(speculation.CONFIRMED if nothing else speculation.RECOVERED)
    hold = nothing and may_retry
    shown = cut.before - state.held
    if finish:
        phase = Phase.DONE
    elif state.retried:
        phase = Phase.RETRY
    else:
        phase = Phase.SPECULATIVE if speculates(state, policy) else Phase.PLAIN
    fed = state.fed + len(cut.force)
    if hold:
        held = len(ids) - shown
    elif state.call_at >= 0 and not finish:
        held = len(ids) - state.call_at
    else:
        held = state.probe.lead if state.probe else 0
    after = state._replace(phase=phase, ids=ids, held=held, fed=fed)
    assert finish or fed == len(ids) - 1, "one decided token, the last, is pending (S1, S2)"
    effects = Effects(
        emit=ids[shown : len(ids) - held],
        replace=None if finish else cut.replace,
        force=() if finish else cut.force,
        finish=finish,
        fallback=fallback,
        notes=tuple(cut.notes),
        places=tuple(cut.places),
        retract=cut.retract,
    )
    return after, effects


def _retry(cut: StepCut, fallback: str | None) -> tuple[State, Effects]:
    """Nothing visible came out, nothing was emitted: decode once more without drafting."""
    state = cut.state
    again = Restart.FRESH if state.retried else Restart.SAVED
    fresh = State(
        phase=Phase.RETRY,
        drafting=state.drafting,
        ran=True,
        retried=state.retried + 1,
        restored=state.restored,
    )
    cut.note(speculation.RETRY)
    notes, places = tuple(cut.notes), tuple(cut.places)
    return fresh, Effects(restart=again, fallback=fallback, notes=notes, places=places)


def _retry_call(cut: StepCut, fallback: str | None) -> tuple[State, Effects]:
    """Have the held call decoded once more, once the host has a grammar for it."""
    state, shown = cut.state, cut.before - cut.state.held
    ids = state.ids.extended(cut.new)
    emit = ids[shown : state.call_at]
    state = state._replace(ids=ids, held=len(ids) - max(shown, state.call_at))
    notes, places = tuple(cut.notes), tuple(cut.places)
    return state, Effects(emit, restart=Restart.CALL, fallback=fallback, notes=notes, places=places)


def _may_retry(state: State, policy: Policy) -> bool:
    """Once, where drafting was on; once more where the prompt's state came from a cache."""
    left = state.retried == 0 or (state.retried == 1 and state.restored)
    return left and state.ran and policy.max_tokens > 0
