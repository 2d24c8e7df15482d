"""The state machine of one request: what its next tokens are, and when and why it ends.

    advance(state, event, policy) -> (state, effects)

`advance` is a pure function. Time, cancellation and failures arrive as events, so a whole history
can be replayed in microseconds, without a device.

**Who decides.** The device decides tokens. It stops a row at stop tokens and at the row's length
limit (`room`), and a row that stopped makes no progress until the host acts on it. This machine
reads the decided tokens one by one, keeps those that count, and returns effects: emit tokens,
replace the pending token, force tokens after it, start over, or finish. Each token is judged by the
output before it alone, so that all decode modes and block sizes cut at the same place.

**Invariants.** Exactly one decided token, the last, is pending: in the output, but in no cache yet.
An emitted token stays emitted. Exactly one `Finish` leaves every request, after its last tokens.

**Tokens that are held.** Three kinds of decided tokens are not emitted at once: an output without
anything visible, while it may be decoded again without drafts (`empty_retry`); a tool call that is
not complete, as it is decoded again under its grammar if it cannot be parsed (`call_retry`); and
the text before a tool call that was forced to see whether the target wants one (`CallProbe`).

**At an end token**, the rules in `floor.py` return a verdict: end the output, take the next best
token instead, probe for or begin a tool call, or close an open thought. The rules in `guards.py`
end outputs that loop. `speculation.py` decides whether the next step drafts, which changes no
token.

`TRANSITIONS` lists the phases of a request:

    WAITING --Prefilled--> SPECULATIVE <--> PLAIN --> DONE
                               |
                               `--> RETRY (the whole answer again, without drafts) --> DONE
"""

from typing import assert_never

from dflash_jax.engine.state_machine import OFF, call_retry, floor, guards, speculation
from dflash_jax.engine.state_machine.floor import EndVerdict
from dflash_jax.engine.state_machine.request_state import (
    CallRetried,
    Cancelled,
    Effects,
    Event,
    Finish,
    Phase,
    Policy,
    Prefilled,
    Restart,
    State,
    StepCut,
    Stepped,
    TokenIds,
    is_visible,
    speculates,
)

_DECODING = {Phase.SPECULATIVE, Phase.PLAIN, Phase.RETRY, Phase.DONE}
# After a call at the beginning of the output was dropped, and with it the whole output. Under the
# grammar of the call, an empty output is not decoded again.
_AFTER_CALL_RETRY = _DECODING - {Phase.RETRY}
_RETRYING, _DONE = {Phase.RETRY, Phase.DONE}, {Cancelled: {Phase.DONE}}
_FIRST = {Stepped: _DECODING, Prefilled: _AFTER_CALL_RETRY} | _DONE
TRANSITIONS: dict[Phase, dict[type, set[Phase]]] = {
    Phase.WAITING: {Prefilled: _DECODING} | _DONE,
    Phase.SPECULATIVE: {CallRetried: {Phase.SPECULATIVE}} | _FIRST,
    Phase.PLAIN: {CallRetried: {Phase.PLAIN}} | _FIRST,
    Phase.RETRY: {Prefilled: _RETRYING, Stepped: _RETRYING, CallRetried: {Phase.RETRY}} | _DONE,
}


def advance(state: State, event: Event, policy: Policy) -> tuple[State, Effects]:
    """Return the next state of a request, and the effects of an event.

    A finished request ignores all events.
    """
    if state.phase is Phase.DONE:
        return state, Effects()
    after, effects = _advance(state, event, policy)
    assert after.phase in TRANSITIONS[state.phase][type(event)]
    return after, effects


def _advance(state: State, event: Event, policy: Policy) -> tuple[State, Effects]:
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
            return state, Effects(notes=("call_retry",), places=(len(ids),), retract=dropped)
        case Prefilled():
            restored = state.restored if state.retried else event.restored
            state = state._replace(restored=restored, fed=-1)
            token, best, finite, _, odds = event
            step = Stepped((token,), finite, next_best=best, call_odds=odds)
            return _stepped(state, step, policy)
        case Stepped():
            return _stepped(state, event, policy)
        case _:
            assert_never(event)


def _never_shown(state: State, reason: Finish) -> int:
    """Return how many of the last ids are dropped if the request is ended from outside.

    A call that is held may yet be decoded again, so a cancelled output ends before it: a cancelled
    output is always a prefix of the whole one.
    """
    if state.probe:
        return state.probe.lead
    if state.call_at >= 0 and reason is Finish.CANCELLED:
        return len(state.ids) - state.call_at
    return 0


def _stepped(state: State, event: Stepped, policy: Policy) -> tuple[State, Effects]:
    if not event.finite:
        return state._replace(phase=Phase.DONE), Effects(finish=Finish.ERROR)
    decided = len(event.tokens)
    paused = policy.speculative and state.drafting.pause > 0  # whether or not it drafted before
    ran = state.ran or paused or speculates(state, policy)
    drafting, fallback = speculation.after_step(
        state.drafting,
        decided,
        event.num_drafts,
        block=event.block,
        finite=event.draft_finite,
        cost=policy.break_even.of_step(
            policy.prompt_tokens + state.fed, max(event.block, event.num_drafts + 1), event.rows
        ),
        fixed=policy.fixed,
    )
    died = drafting.dead and not state.drafting.dead
    state = state._replace(drafting=drafting, ran=ran, fed=state.fed + decided)
    if not decided:
        return state, Effects(fallback=fallback)
    cut, guard, recovery = StepCut(state, len(state.ids), fallback), None, policy.recovery
    if recovery is not OFF and recovery.ends_loops:
        guard = guards.Guard(state.memory, state.ids, recovery, policy.words)
    if policy.max_tokens <= 0:
        cut.finish = Finish.LENGTH
    elif died:
        cut.note(speculation.DEAD)
    for token in event.tokens:
        if cut.finish or _judge(cut, token, event, guard, policy):
            break
    if guard is not None:
        cut.mark(memory=guard.memory)
    return _finish_step(cut, policy)


def _judge(
    cut: StepCut, token: int, event: Stepped, guard: guards.Guard | None, policy: Policy
) -> bool:
    """Add a decided token, or its replacement, to the cut; return whether the step ends there."""
    if cut.state.probe and not floor.accepts_call(cut, token, event.call_odds, policy):
        return True
    if cut.state.calls:
        floor.name_tool(cut, token, event.next_best, policy)
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
        match verdict:
            case EndVerdict.INJECT:
                floor.begin_call(cut, policy)
            case EndVerdict.PROBE:
                floor.probe(cut, token, event.call_odds, policy)
            case EndVerdict.CLOSE:
                _close(cut, token, policy)
            case EndVerdict.HONOUR | EndVerdict.WAIVE:
                if verdict is EndVerdict.WAIVE:
                    cut.note("floor_waived")
                cut.new.append(token)
                cut.end(Finish.STOP)
        if verdict is not EndVerdict.REPLACE:
            return True
        token = cut.replace = event.next_best
        cut.note("min_tokens" if cut.length < policy.recovery.min_tokens else "floor")
    cut.new.append(token)
    if policy.recovery.call_retry:
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
    verdict = floor.judge(cut.ids, odds, cut.state, policy)
    if verdict is EndVerdict.PROBE and not policy.stop_ids.isdisjoint(policy.words.opening):
        verdict = EndVerdict.HONOUR  # the device would stop inside the lead
    ends = verdict in (EndVerdict.HONOUR, EndVerdict.WAIVE)
    return EndVerdict.REPLACE if ends and cut.length < policy.recovery.min_tokens else verdict


def _close(cut: StepCut, token: int, policy: Policy) -> None:
    """Replace a token by the sequence that closes the open thought."""
    close = policy.words.close[: policy.max_tokens - cut.length]
    cut.mark(closed=True)
    cut.force_tokens(close, "thought_closed" if token == close[0] else "thought_closed_by_force")
    cut.end_at_stop(policy)
    if cut.finish is None and cut.length >= policy.max_tokens:
        cut.end(Finish.LENGTH)


def _finish_step(cut: StepCut, policy: Policy) -> tuple[State, Effects]:
    """Return the state and the effects after a step: hold, retry, emit, finish."""
    state, finish = cut.state, cut.finish
    ids = state.ids.extended(cut.new)
    # An empty answer is decoded again once if drafting was on, and a second time if the prompt's
    # state came from the prefix cache.
    left = state.retried == 0 or (state.retried == 1 and state.restored)
    may_retry = policy.recovery.empty_retry and left and state.ran and policy.max_tokens > 0
    looks = may_retry or (finish is not None and state.retried)
    nothing = looks and not is_visible(ids, policy)
    shown = cut.before - state.held
    if finish and nothing and may_retry:  # none of it was emitted: again, without drafts
        cut.note(speculation.RETRY)
        kept = {"drafting": state.drafting, "restored": state.restored, "ran": True}
        fresh = State(Phase.RETRY, retried=state.retried + 1, **kept)
        return fresh, cut.effects(restart=Restart.FRESH if state.retried else Restart.SAVED)
    if cut.retry_call:  # once the host has a grammar for the call, which is held
        state = state._replace(ids=ids, held=len(ids) - max(shown, state.call_at))
        return state, cut.effects(emit=ids[shown : state.call_at], restart=Restart.CALL)
    if finish and state.retried:
        cut.note(speculation.CONFIRMED if nothing else speculation.RECOVERED)
    if finish:
        phase = Phase.DONE
    elif state.retried:
        phase = Phase.RETRY
    else:
        phase = Phase.SPECULATIVE if speculates(state, policy) else Phase.PLAIN
    if nothing and may_retry:
        held = len(ids) - shown
    elif state.call_at >= 0 and not finish:
        held = len(ids) - state.call_at
    else:
        held = state.probe.lead if state.probe else 0
    after = state._replace(phase=phase, ids=ids, held=held, fed=state.fed + len(cut.force))
    assert finish or after.fed == len(ids) - 1, "one decided token, the last, is pending"
    pending = {} if finish else {"replace": cut.replace, "force": cut.force}
    emit = ids[shown : len(ids) - held]
    return after, cut.effects(emit=emit, finish=finish, retract=cut.retract, **pending)
