"""E: an output without anything visible is decoded again, without drafts."""

from types import SimpleNamespace

import pytest
from fake_device import (
    CHAT_EOS,
    EOS,
    SPECIAL,
    STOPS,
    THINK,
    VOCABULARY,
    Device,
    recovery,
    run,
    scripted,
)

from dflash_jax.engine import running_request
from dflash_jax.engine.request import Request
from dflash_jax.engine.state_machine.controller import (
    Cancelled,
    Finish,
    Phase,
    Policy,
    Prefilled,
    Restart,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.speculation import DraftingState

RETRY = recovery(empty_retry=True)


@pytest.mark.parametrize(
    ("script", "restored"),
    [
        pytest.param([SPECIAL], False, id="E1"),
        pytest.param([SPECIAL], True, id="E2"),
        pytest.param([EOS], False, id="E3"),
        pytest.param([CHAT_EOS], True, id="E4"),
        pytest.param([SPECIAL, EOS], False, id="E5"),
        pytest.param([SPECIAL, SPECIAL, CHAT_EOS], False, id="E7"),
    ],
)
def test_an_invisible_output_is_decoded_again_from_the_saved_state(
    script: list[int], restored: bool
) -> None:
    limit = len(script)
    seen = run(
        script, RETRY, retry_target=scripted([42, 43, 44]), restored=restored, max_tokens=limit
    )
    assert seen.attempts == 2
    assert [e.restart for e in seen.effects if e.restart] == [Restart.SAVED]
    assert seen.emitted == [42, 43, 44][:limit]  # the second attempt alone (E18)
    assert seen.state.ran
    assert seen.notes == {"empty_retry": 1, "empty_retry_recovered": 1}


@pytest.mark.parametrize("restored", [False, True])
def test_an_empty_answer_is_decoded_again_where_drafting_was_not_begun(restored: bool) -> None:
    policy = Policy(max_tokens=3, stop_ids=STOPS, recovery=RETRY, vocabulary=VOCABULARY)
    device = Device(
        scripted([SPECIAL, EOS]),
        policy,
        retry_target=scripted([42, 43, 44]),
        restored=restored,
    )
    paused = DraftingState(pause=32)  # as in requests that are not expected to gain
    device.seen.state = device.seen.state._replace(drafting=paused)
    seen = device.run()
    assert (seen.attempts, seen.drafted_steps) == (2, 0)
    assert seen.emitted == [42, 43, 44]


def test_E18_a_stream_shows_only_the_second_attempt() -> None:
    seen = run([SPECIAL, EOS], RETRY, retry_target=scripted([42, EOS]))
    assert seen.emitted == [42, EOS]
    assert seen.state.num_decided == 2


def test_E20_the_retry_feeds_no_prompt_again() -> None:
    seen = run([EOS], RETRY, retry_target=scripted([42, EOS]))
    assert seen.prefills == 1
    assert seen.drafted_steps == 0


@pytest.mark.parametrize(
    "script", [pytest.param([7, EOS], id="E6"), pytest.param([THINK, EOS], id="E8")]
)
def test_anything_visible_is_an_answer(script: list[int]) -> None:
    seen = run(script, RETRY)
    assert (seen.attempts, seen.emitted, seen.finish) == (1, script, Finish.STOP)
    assert not seen.notes


def test_tokens_are_held_until_something_can_be_seen() -> None:
    seen = run([SPECIAL, SPECIAL, 7, EOS], RETRY, accepts=[0])
    emitted = [effects.emit for effects in seen.effects]
    assert emitted == [(), (), (SPECIAL, SPECIAL, 7), (EOS,)]


def test_E9_a_warm_up_without_output_tokens_is_not_repeated() -> None:
    seen = run([EOS], RETRY, max_tokens=0)
    assert (seen.attempts, seen.emitted, seen.finish) == (1, [], Finish.LENGTH)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("plain was asked for", {"speculative": False}, id="E10"),
        pytest.param("no drafter", {"speculative": False}, id="E11"),
    ],
)
def test_plain_outputs_are_not_repeated(case: str, options: dict) -> None:
    seen = run([EOS], RETRY, **options)
    assert (seen.attempts, seen.emitted, seen.finish) == (1, [EOS], Finish.STOP), case


def policy() -> Policy:
    return Policy(max_tokens=20, stop_ids=STOPS, recovery=RETRY, vocabulary=VOCABULARY)


def test_E12_a_failure_is_not_repeated() -> None:
    state, effects = advance(State(), Prefilled(0, finite=False), policy())
    assert (state.phase, effects.finish, effects.restart) == (Phase.DONE, Finish.ERROR, None)


def test_E13_a_request_cancelled_before_its_first_token_is_not_repeated() -> None:
    state, effects = advance(State(), Cancelled(), policy())
    assert (effects.finish, effects.restart, effects.emit) == (Finish.CANCELLED, None, ())
    assert advance(state, Prefilled(EOS), policy())[1].restart is None


def test_E14_a_retry_that_is_empty_too_ends_the_request() -> None:
    seen = run([EOS], RETRY, retry_target=scripted([EOS]))
    assert (seen.attempts, seen.finish, seen.emitted) == (2, Finish.STOP, [EOS])
    assert seen.notes == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}


def test_E15_a_retry_that_fails_fails_the_request() -> None:
    state, effects = advance(State(), Prefilled(EOS), policy())
    assert effects.restart is Restart.SAVED
    state, _ = advance(state, Prefilled(7), policy())
    state, effects = advance(state, Stepped((), finite=False), policy())
    assert (effects.finish, effects.restart) == (Finish.ERROR, None)


def test_E16_the_retry_keeps_the_drafting_statistics_of_the_first_attempt() -> None:
    seen = run([SPECIAL] * 9 + [EOS], RETRY, accepts=[3], retry_target=scripted([42, 43, EOS]))
    assert seen.state.drafting.drafted == 7 * seen.drafted_steps == 7 * 3
    assert seen.state.drafting.accepted == 9 - 3
    assert seen.state.ran
    assert seen.plain_steps == 2


def test_E16_times_of_both_attempts_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(running_request, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    request = Request(prompt=(1,), stop_ids=STOPS, recovery=RETRY, vocabulary=VOCABULARY)
    sequence = running_request.RunningRequest(request, None)
    history = [
        (1.5, Prefilled(SPECIAL)),
        (1.7, Stepped((EOS,), num_drafts=3)),
        (1.7, Prefilled(42)),  # from the saved state
        (2.1, Stepped((43,))),
        (2.2, Cancelled()),
    ]
    now[0] = 1.0
    sequence.start()
    for now[0], event in history:
        sequence.take(event)
    assert sequence.result().token_ids == [42, 43]
    assert sequence.stats.prefill_s == pytest.approx(0.5)
    assert sequence.stats.decode_s == pytest.approx(0.2 + 0.4)


def test_E17_a_loop_of_hidden_tokens_is_counted() -> None:
    looping = recovery(empty_retry=True, loops=True, loop_tokens=2)
    seen = run([SPECIAL] * 40, looping, retry_target=scripted([42, EOS]))
    assert seen.attempts == 2
    assert seen.notes["runaway"] == 1


def test_E19_a_restored_prompt_is_fed_again_when_the_first_retry_is_empty_too() -> None:
    empty, full = scripted([EOS]), scripted([42, EOS])

    class Cached(Device):
        """A device whose output is empty after a restored prompt, and not after a fed one."""

        def prefill(self) -> None:
            self.target = empty if self.seen.prefills == 1 else full
            super().prefill()

    made = Policy(max_tokens=9, stop_ids=STOPS, recovery=RETRY)
    seen = Cached(empty, made, retry_target=empty, restored=True).run()
    assert [e.restart for e in seen.effects if e.restart] == [Restart.SAVED, Restart.FRESH]
    assert (seen.prefills, seen.attempts, seen.emitted) == (2, 3, [42, EOS])
    assert seen.notes == {"empty_retry": 2, "empty_retry_recovered": 1}


def test_E21_an_output_that_ends_at_a_stop_string_is_not_repeated() -> None:
    state, _ = advance(State(), Prefilled(7), policy())
    state, effects = advance(state, Cancelled(Finish.STOP), policy())
    assert (effects.finish, effects.restart) == (Finish.STOP, None)
