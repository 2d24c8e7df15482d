"""The recovery state machine: transitions, and random sequences of events."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.controller import (
    TRANSITIONS,
    CallRetried,
    Cancelled,
    Effects,
    Event,
    Finish,
    Phase,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.request_state import TokenIds, speculates
from dflash_jax.engine.state_machine.speculation import BAD_DRAFTS, PAUSE, TRIAL, BreakEven
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import Tool

FIRST, STOP = 0, 9


def device(history: list[tuple[str, list[int], bool]], policy: Policy) -> list[Event]:
    """Return events a device can send: it cuts after a stop token and at the length limit (R5).

    It does not know about cancellations, so steps continue after one, cut as before.
    """
    events: list[Event] = [Prefilled(FIRST)]
    room, stopped = policy.max_tokens - 1, False
    for kind, tokens, draft_finite in history:
        if kind == "cancel":
            events.append(Cancelled())
            continue
        if kind == "broken":
            events.append(Stepped((), finite=False))
            continue
        kept = [] if stopped else tokens[:room]
        if STOP in kept:
            kept, stopped = kept[: kept.index(STOP) + 1], True
        room -= len(kept)
        events.append(Stepped(tuple(kept), draft_finite=draft_finite))
    return events


histories = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 8 + ["cancel", "broken"]),
        st.lists(st.integers(0, STOP), max_size=8),
        st.booleans(),
    ),
    max_size=30,
)
policies = st.builds(
    Policy,
    max_tokens=st.integers(1, 40),
    stop_ids=st.sampled_from([frozenset(), frozenset({STOP})]),
    speculative=st.booleans(),
)


def run(events: list[Event], policy: Policy) -> tuple[State, list[Effects]]:
    state, seen = State(), []
    for event in events:
        state, effects = advance(state, event, policy)
        seen.append(effects)
    return state, seen


@settings(max_examples=300, deadline=None)
@given(histories, policies)
def test_every_history_ends_at_most_once_and_emits_nothing_after(
    history: list[tuple[str, list[int], bool]], policy: Policy
) -> None:
    if not policy.stop_ids:
        history = [(kind, [t % STOP for t in tokens], ok) for kind, tokens, ok in history]
    events = device(history, policy)
    state, seen = run(events, policy)
    ends = [i for i, effects in enumerate(seen) if effects.finish]
    assert len(ends) <= 1
    assert (state.phase is Phase.DONE) == bool(ends)
    emitted = [t for effects in seen for t in effects.emit]
    assert len(emitted) == state.num_decided <= policy.max_tokens
    if not ends:
        assert len(emitted) < policy.max_tokens
        assert STOP not in emitted
        return
    assert all(effects == Effects() for effects in seen[ends[0] + 1 :])
    steps = [e for e in events[: ends[0] + 1] if isinstance(e, Stepped)]
    decided = [FIRST, *(t for e in steps for t in e.tokens)]
    assert emitted == decided  # nothing the device decided before the end is lost
    finish = seen[ends[0]].finish
    assert (finish is Finish.STOP) == (emitted[-1:] == [STOP])
    if finish is Finish.LENGTH:
        assert len(emitted) == policy.max_tokens
    if finish is Finish.ERROR:
        assert events[ends[0]] == Stepped((), finite=False)
    if finish is Finish.CANCELLED:
        assert events[ends[0]] == Cancelled()


@settings(max_examples=100, deadline=None)
@given(histories, policies)
def test_drafting_ends_for_good_after_three_bad_drafts(
    history: list[tuple[str, list[int], bool]], policy: Policy
) -> None:
    state, bad = State(), 0
    for event in device(history, policy):
        running = state.phase is not Phase.DONE
        state, effects = advance(state, event, policy)
        if running and isinstance(event, Stepped) and event.finite:
            bad += not event.draft_finite
            assert effects.fallback == (None if event.draft_finite else "draft_not_finite")
        assert speculates(state, policy) == (policy.speculative and bad < 3)


def test_a_stop_token_that_is_also_the_last_allowed_one_ends_as_a_stop() -> None:
    policy = Policy(max_tokens=2, stop_ids=frozenset({STOP}))
    _, seen = run([Prefilled(1), Stepped((STOP,))], policy)
    assert [e.finish for e in seen] == [None, Finish.STOP]


def test_a_frozen_row_neither_emits_nor_ends() -> None:
    policy = Policy(max_tokens=5)
    state, seen = run([Prefilled(1), Stepped((1, 2)), Stepped(()), Stepped(())], policy)
    assert state.phase is Phase.SPECULATIVE
    assert seen[2:] == [Effects(), Effects()]


def test_a_stop_string_is_a_cancellation_with_its_own_reason() -> None:
    _, effects = advance(State(), Cancelled(Finish.STOP), Policy(max_tokens=5))
    assert effects == Effects(finish=Finish.STOP)


def test_token_ids_are_immutable_and_extensions_do_not_change_each_other() -> None:
    short = TokenIds([1, 2])
    longer = short.extended([3])
    other = short.extended([4, 5])
    assert (short, longer, other) == ((1, 2), (1, 2, 3), (1, 2, 4, 5))
    assert short.extended([]) == short != longer
    assert (len(longer), longer[-1], longer[1:], other[::-2]) == (3, 3, (2, 3), (5, 2))
    assert hash(longer) == hash(TokenIds([1, 2, 3]))
    with pytest.raises(IndexError):
        short[2]  # though the list it shares is longer
    assert list(short) == [1, 2]


def test_the_default_state_of_requests_is_never_modified() -> None:
    first, second = (State().ids.extended(ids) for ids in ([1], [2]))
    assert (first, second, State().ids) == ((1,), (2,), ())
    assert not State().ids._ids  # otherwise it would keep the first output for ever


def test_a_step_does_not_copy_the_output() -> None:
    """Copying long outputs in every step would take quadratic time."""
    policy = Policy(max_tokens=100, recovery=Recovery())
    state, _ = advance(State(), Prefilled(7), policy)
    for i in range(9):
        before = state.ids
        state, effects = advance(state, Stepped((2 * i, 2 * i + 1), num_drafts=3), policy)
        assert state.ids._ids is before._ids
        assert effects.emit == (2 * i, 2 * i + 1)
    assert state.ids == (7, *range(18))


HIDDEN, OPEN_CALL = 70, 81
RECOVERING = Policy(
    max_tokens=200,
    stop_ids=frozenset({STOP}),
    recovery=dataclasses.replace(OFF, floor=1, call_retry=True),
    vocabulary=OutputVocabulary(
        text=lambda ids: "".join("<tool_call>" if i == OPEN_CALL else "w" for i in ids),
        syntax=SYNTAXES["hermes"],
        tools=(Tool("w", {}),),
        hidden=frozenset({HIDDEN}),
        calls=((80, OPEN_CALL, 82),),
        marker=OPEN_CALL,
    ),
)
NO_DRAFTS = dataclasses.replace(RECOVERING, speculative=False)
RARE_DRAFTS = dataclasses.replace(RECOVERING, break_even=BreakEven.constant(9.0))
RETRYING = dataclasses.replace(RECOVERING, recovery=dataclasses.replace(OFF, empty_retry=True))
RETRYING_BOTH = dataclasses.replace(
    RECOVERING,
    max_tokens=3,
    recovery=dataclasses.replace(RECOVERING.recovery, empty_retry=True),
)
BROKEN = Stepped((), finite=False)
BAD_DRAFT = Stepped((5,), draft_finite=False)
HIDDEN_BAD_DRAFT = Stepped((HIDDEN,), draft_finite=False)
UNFINISHED_CALL = [Prefilled(OPEN_CALL), Stepped((STOP,))]
# Drafting is turned off by the step that ends the call, so the next step is plain.
BAD_DRAFTS_IN_CALL = [
    Prefilled(OPEN_CALL),
    *[BAD_DRAFT] * (BAD_DRAFTS - 1),
    Stepped((STOP,), draft_finite=False),
]
NO_USE = [Stepped((5,), num_drafts=3)] * TRIAL  # until drafting pauses
# Drafting pauses within the call, and its pause ends with the call.
PAUSE_IN_CALL = [
    Prefilled(OPEN_CALL),
    *NO_USE,
    Stepped((*[5] * (PAUSE - 1), STOP)),
]
CALL_IN_RETRY = [Prefilled(HIDDEN), Stepped((HIDDEN, HIDDEN)), *UNFINISHED_CALL]

# For each phase, event and next phase: a history whose last event makes the transition.
HISTORIES: dict[tuple[Phase, type, Phase], tuple[Policy, list[Event]]] = {
    (Phase.WAITING, Prefilled, Phase.SPECULATIVE): (RECOVERING, [Prefilled(5)]),
    (Phase.WAITING, Prefilled, Phase.PLAIN): (NO_DRAFTS, [Prefilled(5)]),
    (Phase.WAITING, Prefilled, Phase.RETRY): (RETRYING, [Prefilled(STOP)]),
    (Phase.WAITING, Prefilled, Phase.DONE): (NO_DRAFTS, [Prefilled(5, finite=False)]),
    (Phase.WAITING, Cancelled, Phase.DONE): (RECOVERING, [Cancelled()]),
    (Phase.SPECULATIVE, Stepped, Phase.SPECULATIVE): (RECOVERING, [Prefilled(5), Stepped((6,))]),
    (Phase.SPECULATIVE, Stepped, Phase.PLAIN): (
        RECOVERING,
        [Prefilled(5), *[BAD_DRAFT] * BAD_DRAFTS],
    ),
    (Phase.SPECULATIVE, Stepped, Phase.RETRY): (RETRYING, [Prefilled(HIDDEN), Stepped((STOP,))]),
    (Phase.SPECULATIVE, Stepped, Phase.DONE): (RETRYING, [Prefilled(5), Stepped((STOP,))]),
    (Phase.SPECULATIVE, Prefilled, Phase.SPECULATIVE): (
        RECOVERING,
        [*UNFINISHED_CALL, CallRetried(), Prefilled(5)],
    ),
    (Phase.SPECULATIVE, Prefilled, Phase.PLAIN): (
        RECOVERING,
        [*BAD_DRAFTS_IN_CALL, CallRetried(), Prefilled(5)],
    ),
    (Phase.SPECULATIVE, Prefilled, Phase.DONE): (
        RECOVERING,
        [*UNFINISHED_CALL, CallRetried(), Prefilled(5, finite=False)],
    ),
    (Phase.SPECULATIVE, CallRetried, Phase.SPECULATIVE): (
        RECOVERING,
        [*UNFINISHED_CALL, CallRetried()],
    ),
    (Phase.SPECULATIVE, Cancelled, Phase.DONE): (RECOVERING, [Prefilled(5), Cancelled()]),
    (Phase.PLAIN, Stepped, Phase.SPECULATIVE): (
        RARE_DRAFTS,
        [Prefilled(5), *NO_USE, Stepped((5,) * PAUSE)],
    ),
    (Phase.PLAIN, Stepped, Phase.PLAIN): (NO_DRAFTS, [Prefilled(5), Stepped((6,))]),
    (Phase.PLAIN, Stepped, Phase.RETRY): (
        RETRYING,
        [Prefilled(HIDDEN), *[HIDDEN_BAD_DRAFT] * BAD_DRAFTS, Stepped((STOP,))],
    ),
    (Phase.PLAIN, Stepped, Phase.DONE): (NO_DRAFTS, [Prefilled(5), Stepped((STOP,))]),
    (Phase.PLAIN, Prefilled, Phase.SPECULATIVE): (
        RARE_DRAFTS,
        [*PAUSE_IN_CALL, CallRetried(), Prefilled(5)],
    ),
    (Phase.PLAIN, Prefilled, Phase.PLAIN): (
        NO_DRAFTS,
        [*UNFINISHED_CALL, CallRetried(), Prefilled(5)],
    ),
    (Phase.PLAIN, Prefilled, Phase.DONE): (
        NO_DRAFTS,
        [*UNFINISHED_CALL, CallRetried(), Prefilled(5, finite=False)],
    ),
    (Phase.PLAIN, CallRetried, Phase.PLAIN): (NO_DRAFTS, [*UNFINISHED_CALL, CallRetried()]),
    (Phase.PLAIN, Cancelled, Phase.DONE): (NO_DRAFTS, [Prefilled(5), Cancelled()]),
    (Phase.RETRY, Prefilled, Phase.RETRY): (RETRYING, [Prefilled(STOP), Prefilled(5)]),
    (Phase.RETRY, Prefilled, Phase.DONE): (RETRYING, [Prefilled(STOP), Prefilled(STOP)]),
    (Phase.RETRY, Stepped, Phase.RETRY): (
        RETRYING,
        [Prefilled(STOP), Prefilled(5), Stepped((6,))],
    ),
    (Phase.RETRY, Stepped, Phase.DONE): (RETRYING, [Prefilled(STOP), Prefilled(5), BROKEN]),
    (Phase.RETRY, CallRetried, Phase.RETRY): (RETRYING_BOTH, [*CALL_IN_RETRY, CallRetried()]),
    (Phase.RETRY, Cancelled, Phase.DONE): (RETRYING, [Prefilled(STOP), Cancelled()]),
}
LISTED = [
    (phase, event, after)
    for phase, events in TRANSITIONS.items()
    for event, phases in events.items()
    for after in sorted(phases, key=lambda phase: phase.value)
]


@pytest.mark.parametrize(
    ("phase", "event", "after"),
    [
        pytest.param(*entry, id=f"{entry[0].value}-{entry[1].__name__}-{entry[2].value}")
        for entry in LISTED
    ],
)
def test_every_transition_of_the_table_is_reached(phase: Phase, event: type, after: Phase) -> None:
    policy, (*before, last) = HISTORIES[phase, event, after]
    state, seen = run(before, policy)
    assert (state.phase, type(last)) == (phase, event)
    assert all(effects.finish is None for effects in seen)
    state, effects = advance(state, last, policy)
    assert state.phase is after
    assert (effects.finish is not None) == (after is Phase.DONE)


def test_every_history_belongs_to_a_transition_of_the_table() -> None:
    assert set(LISTED) == HISTORIES.keys()
