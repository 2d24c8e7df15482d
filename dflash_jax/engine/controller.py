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

import dataclasses
from collections.abc import Sequence
from typing import Any, assert_never

from dflash_jax.engine.recovery import floor, guards, repeated_calls, speculation, tool_names
from dflash_jax.engine.recovery.floor import Verdict
from dflash_jax.engine.request_state import (
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
)


def advance(state: State, event: Event, policy: Policy) -> tuple[State, Effects]:
    """The next state of a request, and what to do about it."""
    if state.phase is Phase.DONE:
        return state, Effects()
    match event:
        case Cancelled(reason):
            rest = state.ids[len(state.ids) - state.held :]
            done = state._replace(phase=Phase.DONE, held=0)
            return done, Effects(emit=rest, finish=reason)
        case Prefilled():
            restored = state.restored if state.retried else event.restored
            state = state._replace(restored=restored, fed=-1)
            step = Stepped((event.token,), finite=event.finite, floor=event.floor)
            return _stepped(state, step, policy)
        case Stepped():
            return _stepped(state, event, policy)
        case _:
            assert_never(event)


def speculates(state: State, policy: Policy) -> bool:
    """Whether the next step of this request should draft; one that chooses a name need not."""
    return policy.speculative and not state.retried and state.lane.drafts and not state.calls


def is_visible(state: State, policy: Policy) -> bool:
    """Whether a caller sees anything of the output."""
    return _is_visible(state.ids, policy)


def _is_visible(ids: Sequence[int], policy: Policy) -> bool:
    ended = bool(ids) and ids[-1] in policy.stop_ids
    return policy.words.is_visible(ids[:-1] if ended else ids)


def room(state: State, policy: Policy) -> int:
    """Output tokens the device may decide in all before the host has to speak."""
    if state.calls:
        return min(state.emitted + 1, policy.max_tokens)
    if policy.close_at is None or state.past_close:
        return policy.max_tokens
    return min(max(policy.close_at, state.emitted) + 1, policy.max_tokens)


def choices(state: State) -> Ids:
    """Return the tokens of which the next step must report the best; most steps have none."""
    return tool_names.choices(state.calls)


def _stepped(state: State, event: Stepped, policy: Policy) -> tuple[State, Effects]:
    if not event.finite:
        return state._replace(phase=Phase.DONE), Effects(finish=Finish.ERROR)
    decided = len(event.tokens)
    ran = state.ran or speculates(state, policy)
    lane, fallback = speculation.heard(
        state.lane,
        decided,
        event.drafts,
        finite=event.draft_finite,
        break_even=policy.break_even,
        fixed=policy.fixed,
    )
    died = lane.dead and not state.lane.dead
    state = state._replace(lane=lane, ran=ran, fed=state.fed + decided)
    if not decided:
        return state, Effects(fallback=fallback)
    plan = _Plan(state, before=len(state.ids))
    guard = guards.guard_of(
        state.memory, state.ids.last, len(state.ids), policy.recovery, policy.words
    )
    if policy.max_tokens <= 0:
        plan.finish = Finish.LENGTH
    elif died:
        plan.note(speculation.DEAD)
    for token in event.tokens:
        if plan.finish or _judge(plan, token, event.floor, guard, policy):
            break
    if guard is not None:
        plan.mark(memory=guard.memory)
    return _settle(plan, policy, fallback)


@dataclasses.dataclass(slots=True)
class _Plan:
    """The cut in the making: nothing of it has happened yet."""

    state: State
    before: int  # ids decided before
    new: list[int] = dataclasses.field(default_factory=list)
    replace: int | None = None
    force: Ids = ()
    finish: Finish | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)  # of the notes

    @property
    def ids(self) -> Ids:
        return (*self.state.ids[:], *self.new)

    def since(self, place: int) -> Ids:
        """The output from a place on."""
        return (*self.state.ids[place:], *self.new[max(place - self.before, 0) :])

    @property
    def length(self) -> int:
        return self.before + len(self.new)

    def mark(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)

    def note(self, event: str) -> None:
        """Record a recovery event at the place of the next output token."""
        self.notes.append(event)
        self.places.append(self.length)

    def dictate(self, ids: Ids, note: str) -> None:
        """Puts ids in the place of the pending token and behind it."""
        self.note(note)
        self.new += ids
        self.replace, self.force = ids[0], ids[1:]

    def end(self, finish: Finish) -> None:
        """Ends the output; a loop it ran into is why, unless it ended by itself.

        Calls are repeated whoever ends the output after them.
        """
        self.finish, guard = finish, self.state.guard
        if guard is not None and (finish is Finish.LENGTH or guard == repeated_calls.KIND):
            self.note(guard)
            self.mark(kind=guard)


def _judge(
    plan: _Plan, token: int, floor_token: int, guard: guards.Guard | None, policy: Policy
) -> bool:
    """Takes one decided token into the plan, or what stands in its place; True at the cut.

    Tokens are judged one by one, by the output so far alone: then every lane cuts alike (S6).
    """
    if plan.state.calls:
        _name_tool(plan, token, floor_token, policy)
        return True
    stop = token in policy.stop_ids
    if plan.state.guard is not None and not stop:
        plan.end(Finish.LENGTH)
        return True
    if not plan.state.past_close and policy.close_at is not None and plan.length >= policy.close_at:
        plan.mark(past_close=True)
        if policy.words.thinking(plan.ids):
            _close(plan, token, policy)
            return True
    if stop:
        verdict = _at_end_token(plan, policy)
        if verdict is Verdict.INJECT:
            _begin_call(plan, policy)
            return True
        if verdict is not Verdict.REPLACE:
            if verdict is Verdict.WAIVE:
                plan.note("floor_waived")
            plan.new.append(token)
            plan.end(Finish.STOP)
            return True
        token = plan.replace = floor_token
        plan.note("min_tokens" if _too_few(plan, policy) else "floor")
    plan.new.append(token)
    if guard is not None and (kind := guard.take(token, plan.since, closed=plan.state.closed)):
        plan.mark(guard=kind)
    if plan.length >= policy.max_tokens:
        plan.end(Finish.LENGTH)
    return plan.finish is not None


def _at_end_token(plan: _Plan, policy: Policy) -> Verdict:
    if plan.state.guard is not None:
        return Verdict.HONOUR
    verdict = Verdict.HONOUR
    if policy.recovery.floor:
        verdict = floor.judge(
            plan.ids,
            injected=plan.state.injected,
            max_tokens=policy.max_tokens,
            recovery=policy.recovery,
            words=policy.words,
        )
    if _too_few(plan, policy) and verdict is not Verdict.INJECT:
        return Verdict.REPLACE
    return verdict


def _too_few(plan: _Plan, policy: Policy) -> bool:
    """Whether the output may not end yet, whatever it says."""
    return plan.length < policy.recovery.min_tokens


def _begin_call(plan: _Plan, policy: Policy) -> None:
    """Force the beginning of a tool call in place of an end token, up to where names differ."""
    first = policy.words.calls[0][:1]
    shared, rest = tool_names.split([ids for ids in policy.words.calls if ids[:1] == first])
    plan.mark(injected=True, calls=rest)
    plan.dictate(shared, "tool_prefix")
    _end_at_stop(plan, policy)


def _name_tool(plan: _Plan, token: int, best: int, policy: Policy) -> None:
    """Take the token that chooses the tool of a forced call, and force what follows from it.

    Args:
      token: the target's own choice; taken if it continues a declared name.
      best: the target's best token of those that continue a declared name.
    """
    calls = plan.state.calls
    known = {ids[0] for ids in calls}
    chosen = next(i for i in (token, best, calls[0][0]) if i in known)
    shared, rest = tool_names.split(tool_names.following(calls, chosen))
    plan.mark(calls=rest)
    plan.new += (chosen, *shared)
    plan.replace, plan.force = None if chosen == token else chosen, shared
    _end_at_stop(plan, policy)


def _close(plan: _Plan, token: int, policy: Policy) -> None:
    """Ends an open thought in the place of the token, with the whole closing sequence."""
    close = policy.words.close[: policy.max_tokens - plan.length]
    plan.mark(closed=True)
    plan.dictate(close, "thought_closed" if token == close[0] else "thought_closed_by_force")
    _end_at_stop(plan, policy)
    if plan.finish is None and plan.length >= policy.max_tokens:
        plan.end(Finish.LENGTH)


def _end_at_stop(plan: _Plan, policy: Policy) -> None:
    """Dictated tokens may end with one that stops: the device would freeze behind it for ever."""
    if plan.new[-1] in policy.stop_ids:
        plan.end(Finish.STOP)


def _settle(plan: _Plan, policy: Policy, fallback: str | None) -> tuple[State, Effects]:
    """Turns the plan into the new state and its effects: hold, retry, emit, finish."""
    state, finish = plan.state, plan.finish
    ids = state.ids.adding(plan.new)
    may_retry = policy.recovery.empty_retry and _may_retry(state, policy)
    looks = may_retry or (finish is not None and state.retried)  # else nobody asks
    nothing = looks and not _is_visible(ids, policy)
    if finish and nothing and may_retry:
        return _retry(plan, fallback)
    if finish and state.retried:
        plan.note(speculation.CONFIRMED if nothing else speculation.RECOVERED)
    hold = nothing and may_retry
    shown = plan.before - state.held
    if finish:
        phase = Phase.DONE
    elif state.retried:
        phase = Phase.RETRY
    else:
        phase = Phase.SPECULATIVE if speculates(state, policy) else Phase.PLAIN
    fed = state.fed + len(plan.force)
    held = len(ids) - shown if hold else 0
    after = state._replace(phase=phase, ids=ids, held=held, fed=fed)
    assert finish or fed == len(ids) - 1, "one decided token, the last, is pending (S1, S2)"
    effects = Effects(
        emit=() if hold else ids[shown:],
        replace=None if finish else plan.replace,
        force=() if finish else plan.force,
        finish=finish,
        fallback=fallback,
        notes=tuple(plan.notes),
        places=tuple(plan.places),
    )
    return after, effects


def _retry(plan: _Plan, fallback: str | None) -> tuple[State, Effects]:
    """Nothing visible came out, nothing was emitted: decode once more without drafting."""
    state = plan.state
    again = Restart.FRESH if state.retried else Restart.SAVED
    fresh = State(
        phase=Phase.RETRY,
        lane=state.lane,
        ran=True,
        retried=state.retried + 1,
        restored=state.restored,
        kind=state.kind,
    )
    plan.note(speculation.RETRY)
    notes, places = tuple(plan.notes), tuple(plan.places)
    return fresh, Effects(restart=again, fallback=fallback, notes=notes, places=places)


def _may_retry(state: State, policy: Policy) -> bool:
    """Once, where drafting was on; once more where the prompt's state came from a cache."""
    left = state.retried == 0 or (state.retried == 1 and state.restored)
    return left and state.ran and policy.max_tokens > 0
