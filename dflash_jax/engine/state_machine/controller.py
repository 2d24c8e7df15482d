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

**Rules.** Each token is judged by `RULES` in their order, up to the first that ends the step. Those
in `floor.py` judge an end token: it ends the output, becomes the replacement token, probes for or
begins a tool call, or closes an open thought. Those in `rules.py` end outputs that loop. They read
the output by `Policy.output`. `speculation.py` decides whether the next step drafts, which changes
no token.

`TRANSITIONS` lists the phases of a request:

    WAITING --Prefilled--> SPECULATIVE <--> PLAIN --> DONE
                               |
                               `--> RETRY (the whole answer again, without drafts) --> DONE
"""

from typing import assert_never

from dflash_jax.engine.state_machine import OFF, guards, rules, speculation
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
    StepDecision,
    Stepped,
    TokenIds,
    is_visible,
    speculates,
)

_DECODING = {Phase.SPECULATIVE, Phase.PLAIN, Phase.RETRY, Phase.DONE}
# After a call at the beginning of the output was dropped, and with it the whole output. Under the
# grammar of the call, an empty output is not decoded again.
_AFTER_CALL_RETRY = _DECODING - {Phase.RETRY}
_RETRYING = {Phase.RETRY, Phase.DONE}
_DONE = {Cancelled: {Phase.DONE}}
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
            return _cancelled(state, reason)
        case CallRetried():
            return _call_retried(state)
        case Prefilled():
            restored = state.restored if state.retried else event.restored
            state = state._replace(restored=restored, num_computed=-1)
            step = Stepped(
                (event.token,),
                finite=event.finite,
                replacement_token=event.replacement_token,
                tool_call_margin=event.tool_call_margin,
            )
            return _stepped(state, step, policy)
        case Stepped():
            return _stepped(state, event, policy)
        case _:
            assert_never(event)


def _cancelled(state: State, reason: Finish) -> tuple[State, Effects]:
    """Emit the held tokens, but for those that are never shown, and end the request."""
    dropped = _never_shown(state, reason)
    shown = len(state.ids) - state.held
    ids = state.ids
    if dropped:
        ids = TokenIds(state.ids[: len(state.ids) - dropped])
    done = state._replace(phase=Phase.DONE, ids=ids, held=0, probe=None, call_at=-1)
    return done, Effects(emit=ids[shown:], finish=reason, retract=dropped)


def _call_retried(state: State) -> tuple[State, Effects]:
    """Drop the held call, which is decoded again under a grammar."""
    ids = TokenIds(state.ids[: state.call_at])
    without_call = state._replace(
        ids=ids,
        held=0,
        num_computed=len(ids) - 1,
        guard=None,
        memory=guards.NO_MEMORY,
        call_at=-1,
        call_retried=True,
    )
    dropped = len(state.ids) - state.call_at
    return without_call, Effects(notes=("call_retry",), positions=(len(ids),), retract=dropped)


def _never_shown(state: State, reason: Finish) -> int:
    """Return how many ids at the end are dropped if the request is ended from outside.

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
    paused = policy.speculative and state.drafting.pause > 0  # even if it never drafted
    ran = state.ran or paused or speculates(state, policy)
    block = max(event.block, event.num_drafts + 1)
    position = policy.prompt_tokens + state.num_computed
    drafting, fallback = speculation.after_step(
        state.drafting,
        decided,
        event.num_drafts,
        block=event.block,
        finite=event.draft_finite,
        cost=policy.break_even.of_step(position, block, event.rows),
        fixed=policy.fixed,
    )
    died = drafting.dead and not state.drafting.dead
    state = state._replace(drafting=drafting, ran=ran, num_computed=state.num_computed + decided)
    if not decided:
        return state, Effects(fallback=fallback)
    decision = StepDecision(state, len(state.ids), fallback)
    if policy.recovery is not OFF and policy.recovery.ends_loops:
        decision.loops = guards.Guard(state.memory, state.ids, policy.recovery, policy.vocabulary)
    order = _rules_of_step(state, policy)
    if policy.max_tokens <= 0:
        decision.finish = Finish.LENGTH
    elif died:
        decision.note(speculation.DEAD)
    for token in event.tokens:
        decision.token = token
        if decision.finish or _judge(decision, event, policy, order):
            break
    if decision.loops is not None:
        decision.mark(memory=decision.loops.memory)
    return _finish_step(decision, policy)


def _judge(
    decision: StepDecision, event: Stepped, policy: Policy, order: tuple[rules.RecoveryRule, ...]
) -> bool:
    """Apply rules to a token; return whether the step ends with it."""
    for rule in order:  # noqa: SIM110  (a generator costs as much as three rules)
        if rule(decision, event, policy):
            return True
    return False


def _end_output(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """End the output with an end token; a rule."""
    if decision.token not in policy.stop_ids:
        return False
    decision.new.append(decision.token)
    decision.end(Finish.STOP)
    return True


def _keep(decision: StepDecision, _: Stepped, __: Policy) -> bool:
    """Add the token to the output; a rule."""
    decision.new.append(decision.token)
    return False


def _end_at_limit(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """End the output at its length limit; a rule."""
    if decision.length >= policy.max_tokens:
        decision.end(Finish.LENGTH)
    return decision.finish is not None


# What judges each decided token, in this order.
RULES = (
    *rules.BEFORE_TOKEN,
    rules.ListedRule(_keep),
    *rules.AFTER_TOKEN,
    rules.ListedRule(_end_at_limit),
)
RULES_OFF: tuple[rules.RecoveryRule, ...] = (_end_output, _keep, _end_at_limit)  # without recovery


def _rules_of_step(state: State, policy: Policy) -> tuple[rules.RecoveryRule, ...]:
    """Return the rules that judge the tokens of a step, in their order."""
    if policy.recovery is OFF:
        return RULES_OFF
    return tuple(rule.judge for rule in RULES if rule.applies(state, policy))


def _finish_step(decision: StepDecision, policy: Policy) -> tuple[State, Effects]:
    """Return the state and the effects after a step: hold, retry, emit, finish."""
    state = decision.state
    finish = decision.finish
    ids = state.ids.extended(decision.new)
    may_retry = _may_retry(state, policy)
    is_empty = False
    if may_retry or (finish and state.retried):
        is_empty = not is_visible(ids, policy)
    shown = decision.before - state.held
    if finish and is_empty and may_retry:  # none of the answer was emitted
        decision.note(speculation.RETRY)
        fresh = State(
            Phase.RETRY,
            drafting=state.drafting,
            ran=True,
            retried=state.retried + 1,
            restored=state.restored,
        )
        return fresh, decision.effects(restart=Restart.FRESH if state.retried else Restart.SAVED)
    if decision.retry_call:  # the call is held until the host has a grammar for it
        state = state._replace(ids=ids, held=len(ids) - max(shown, state.call_at))
        return state, decision.effects(emit=ids[shown : state.call_at], restart=Restart.CALL)
    if finish and state.retried:
        decision.note(speculation.CONFIRMED if is_empty else speculation.RECOVERED)
    if is_empty and may_retry:
        held = len(ids) - shown
    elif state.call_at >= 0 and not finish:
        held = len(ids) - state.call_at
    else:
        held = state.probe.lead if state.probe else 0
    after = state._replace(
        phase=_phase_after(state, finish, policy),
        ids=ids,
        held=held,
        num_computed=state.num_computed + len(decision.force),
    )
    assert finish or after.num_computed == len(ids) - 1, "one decided token, the last, is pending"
    effects = decision.effects(
        emit=ids[shown : len(ids) - held],
        replace=None if finish else decision.replace,
        force=() if finish else decision.force,
        finish=finish,
        retract=decision.retract,
    )
    return after, effects


def _may_retry(state: State, policy: Policy) -> bool:
    """Return whether the answer is decoded again, without drafts, if it ends empty.

    That happens once if drafting was on, and a second time if the prompt's state came from the
    prefix cache.
    """
    if not policy.recovery.empty_retry or not state.ran or policy.max_tokens <= 0:
        return False
    return state.retried == 0 or (state.retried == 1 and state.restored)


def _phase_after(state: State, finish: Finish | None, policy: Policy) -> Phase:
    """Return the phase after a step."""
    if finish:
        return Phase.DONE
    if state.retried:
        return Phase.RETRY
    return Phase.SPECULATIVE if speculates(state, policy) else Phase.PLAIN
