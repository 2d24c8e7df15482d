"""C: who may end a request, and what outranks it."""

import copy

from fake_device import EOS, STALL, STOPS, WORDS, recovery

from dflash_jax.engine.recovery.cancellation import CancelCell, Compute, Handle, classify
from dflash_jax.engine.recovery.controller import (
    Cancelled,
    Effects,
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)


def test_C1_nothing_is_given_to_a_caller_who_left() -> None:
    given: list[int] = []
    handle = Handle(asked=lambda: True, callbacks=(given.append,))
    assert not handle.emit(123)
    assert handle.cell.reason == "client_abort"
    assert given == []


def test_C2_callbacks_run_in_turn_until_the_end() -> None:
    given: list[str] = []
    handle = Handle(callbacks=(lambda token: given.append(f"a{token}"),))
    handle = handle.adding(lambda token: given.append(f"b{token}"))
    assert handle.emit(1)
    handle.cell.cancel("disconnect")
    assert not handle.emit(2)
    assert given == ["a1", "b1"]


def test_a_callback_that_refuses_stops_the_chain() -> None:
    given: list[int] = []
    handle = Handle(callbacks=(lambda token: False,)).adding(given.append)
    assert not handle.emit(1)
    assert handle.cell
    assert given == []


def test_C3_a_failure_is_no_cancellation() -> None:
    polls: list[int] = []
    handle = Handle(asked=lambda: bool(polls.append(1)) or True)
    assert classify(False, handle) is Compute.FAILED
    assert polls == []
    assert not handle.cell


def test_C4_a_finished_step_of_a_caller_who_left_is_a_cancellation() -> None:
    polls: list[int] = []
    handle = Handle(asked=lambda: bool(polls.append(1)) or True)
    assert classify(True, handle) is Compute.CANCELLED
    assert polls == [1]
    assert classify(True, Handle()) is Compute.OK


def test_C10_copies_share_their_cell() -> None:
    handle = Handle()
    copy.copy(handle).adding(print).cell.cancel("shutdown")
    handle.cell.cancel("disconnect")
    assert handle.cell.reason == "shutdown"
    assert CancelCell().reason is None


def test_C11_a_stop_string_is_an_end_and_no_cancellation() -> None:
    state, _ = advance(State(), Prefilled(7), Policy(max_tokens=9))
    assert advance(state, Cancelled(Finish.STOP), Policy(max_tokens=9))[1].finish is Finish.STOP


def test_C12_a_request_can_be_cancelled_behind_dictated_tokens() -> None:
    policy = Policy(max_tokens=40, stop_ids=STOPS, recovery=recovery(**STALL), words=WORDS)
    state, _ = advance(State(), Prefilled(58), policy)
    state, effects = advance(state, Stepped((EOS,)), policy)
    assert effects.force
    state, effects = advance(state, Cancelled(), policy)
    assert effects == Effects(finish=Finish.CANCELLED)
    assert state.fed == len(state.ids) - 1


def test_C18_a_deadline_ends_with_what_there_is() -> None:
    state, _ = advance(State(), Prefilled(7), Policy(max_tokens=9))
    state, effects = advance(state, Cancelled(Finish.LENGTH), Policy(max_tokens=9))
    assert (effects.finish, state.ids) == (Finish.LENGTH, (7,))
