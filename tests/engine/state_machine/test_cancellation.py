"""C: cancellation, and which finish reason takes precedence."""

from fake_device import EOS, STALL, STOPS, VOCABULARY, recovery

from dflash_jax.engine.request import CancelCell, Request
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine.controller import (
    Cancelled,
    Effects,
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)


def sequence(cell: CancelCell) -> RunningRequest:
    return RunningRequest(
        Request(prompt=(1,), params=SamplingParams(max_tokens=9)), None, cancel=cell
    )


def test_C1_C2_nothing_is_emitted_after_a_disconnect() -> None:
    request = sequence(CancelCell())
    request.take(Prefilled(7))
    assert request.output.ids == [7]
    request.abandon("disconnect")
    assert request.take(Stepped((8, 9))).emit == ()
    assert request.result().token_ids == [7]
    assert request.result().finish_reason == "cancelled"
    assert request.stats.recovery == {"cancelled_disconnect": 1}


def test_C10_the_first_reason_is_kept() -> None:
    cell = CancelCell()
    first, second = sequence(cell), sequence(cell)
    first.cancel.cancel("shutdown")
    second.cancel.cancel("disconnect")
    assert cell.reason == "shutdown"
    assert CancelCell().reason is None


def test_C11_a_stop_string_finishes_with_stop_not_cancelled() -> None:
    state, _ = advance(State(), Prefilled(7), Policy(max_tokens=9))
    assert advance(state, Cancelled(Finish.STOP), Policy(max_tokens=9))[1].finish is Finish.STOP


def test_C12_a_request_can_be_cancelled_after_forced_tokens() -> None:
    policy = Policy(
        max_tokens=40, stop_ids=STOPS, recovery=recovery(**STALL), vocabulary=VOCABULARY
    )
    state, _ = advance(State(), Prefilled(58), policy)
    state, effects = advance(state, Stepped((EOS,)), policy)
    assert effects.force
    state, effects = advance(state, Cancelled(), policy)
    assert effects == Effects(finish=Finish.CANCELLED)
    assert state.num_computed == len(state.ids) - 1


def test_C18_a_deadline_keeps_the_output_so_far() -> None:
    state, _ = advance(State(), Prefilled(7), Policy(max_tokens=9))
    state, effects = advance(state, Cancelled(Finish.LENGTH), Policy(max_tokens=9))
    assert (effects.finish, state.ids) == (Finish.LENGTH, (7,))
