"""Histories of the request machine: what a device may say, in any order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.recovery import Recovery
from dflash_jax.engine.recovery.controller import (
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
from dflash_jax.engine.recovery.request_state import TokenIds, speculates

FIRST, STOP = 0, 9


def device(history: list[tuple[str, list[int], bool]], policy: Policy) -> list[Event]:
    """Events a device can send: it cuts behind a stop token and at the length limit (R5).

    It does not know about cancellations, so steps go on after one, cut as if it never came.
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
    said = [FIRST, *(t for e in steps for t in e.tokens)]
    assert emitted == said  # nothing the device decided before the end is lost
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
        live = state.phase is not Phase.DONE
        state, effects = advance(state, event, policy)
        if live and isinstance(event, Stepped) and event.finite:
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


def test_what_was_said_is_a_value_whatever_continues_it() -> None:
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


def test_the_state_that_every_request_begins_with_is_never_written_to() -> None:
    first, second = (State().ids.extended(ids) for ids in ([1], [2]))
    assert (first, second, State().ids) == ((1,), (2,), ())
    assert not State().ids._ids  # else it would keep the first output for ever


def test_a_step_copies_nothing_of_what_was_said() -> None:
    """Outputs are long: a host that copied them in every step would be slower and slower."""
    policy = Policy(max_tokens=100, recovery=Recovery())
    state, _ = advance(State(), Prefilled(7), policy)
    for i in range(9):
        before = state.ids
        state, effects = advance(state, Stepped((2 * i, 2 * i + 1), num_drafts=3), policy)
        assert state.ids._ids is before._ids
        assert effects.emit == (2 * i, 2 * i + 1)
    assert state.ids == (7, *range(18))
