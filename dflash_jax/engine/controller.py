"""What one request does next: a pure function of its state and of what the device said.

    advance(state, event, policy) -> (state, effects)

No clock, no arrays, no I/O: time and failures arrive as events, and a whole history can be
replayed in microseconds. The device has already cut every step at stop tokens and at the
length limit; this machine never shortens what it is told, it emits it and decides whether the
request goes on, and in which lane.

    WAITING --Prefilled--> DECODING --Stepped--> ... --> DONE

Exactly one `Finish` leaves every request, after its last `Emit`; nothing follows it.
"""

import dataclasses
import enum
from typing import assert_never


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    DECODING = "decoding"
    DONE = "done"


class Finish(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the caller asked for."""

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True
    bad_drafts: int = 3  # non-finite drafts after which a request goes on without drafting


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What is remembered of a request."""

    phase: Phase = Phase.WAITING
    emitted: int = 0
    bad_drafts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """The device decided tokens for this row; none if the row was frozen."""

    tokens: tuple[int, ...]
    finite: bool = True
    draft_finite: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller went away, or a stop string was completed."""

    reason: Finish = Finish.CANCELLED


Event = Stepped | Cancelled


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """What the engine must do now."""

    emit: tuple[int, ...] = ()
    finish: Finish | None = None
    fallback: str | None = None  # why this round was, or later ones will be, plain


def advance(state: State, event: Event, policy: Policy) -> tuple[State, Effects]:
    """The next state of a request, and what to do about it."""
    if state.phase is Phase.DONE:
        return state, Effects()
    match event:
        case Cancelled(reason):
            return dataclasses.replace(state, phase=Phase.DONE), Effects(finish=reason)
        case Stepped():
            return _stepped(state, event, policy)
        case _:
            assert_never(event)


def _stepped(state: State, event: Stepped, policy: Policy) -> tuple[State, Effects]:
    if not event.finite:
        return dataclasses.replace(state, phase=Phase.DONE), Effects(finish=Finish.ERROR)
    emitted = state.emitted + len(event.tokens)
    finish = None
    if event.tokens and event.tokens[-1] in policy.stop_ids:
        finish = Finish.STOP
    elif emitted >= policy.max_tokens:
        finish = Finish.LENGTH
    state = State(
        phase=Phase.DONE if finish else Phase.DECODING,
        emitted=emitted,
        bad_drafts=state.bad_drafts + (not event.draft_finite),
    )
    fallback = None if event.draft_finite else "draft_not_finite"
    return state, Effects(emit=event.tokens, finish=finish, fallback=fallback)


def speculates(state: State, policy: Policy) -> bool:
    """Whether the next step of this request should draft."""
    return policy.speculative and state.bad_drafts < policy.bad_drafts
