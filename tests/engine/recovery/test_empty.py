"""E: an output in which nobody sees anything is decoded once more, plainly."""

from types import SimpleNamespace

import pytest
from fake_device import CHAT_EOS, EOS, SPECIAL, STOPS, THINK, WORDS, Device, recovery, run, says

from dflash_jax.engine import sequence as sequences
from dflash_jax.engine.recovery.controller import (
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
from dflash_jax.engine.request import Request

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
def test_nothing_visible_is_decoded_once_more_from_the_saved_state(
    script: list[int], restored: bool
) -> None:
    limit = len(script)
    seen = run(script, RETRY, say_again=says([42, 43, 44]), restored=restored, max_tokens=limit)
    assert seen.attempts == 2
    assert [e.restart for e in seen.effects if e.restart] == [Restart.SAVED]
    assert seen.emitted == [42, 43, 44][:limit]  # the caller saw the second attempt alone (E18)
    assert seen.state.ran
    assert seen.notes == {"empty_retry": 1, "empty_retry_recovered": 1}


def test_E18_a_stream_shows_the_second_attempt_alone() -> None:
    seen = run([SPECIAL, EOS], RETRY, say_again=says([42, EOS]))
    assert seen.emitted == [42, EOS]
    assert seen.state.num_decided == 2


def test_E20_the_retry_feeds_no_prompt_again() -> None:
    seen = run([EOS], RETRY, say_again=says([42, EOS]))
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
    given = [effects.emit for effects in seen.effects]
    assert given == [(), (), (SPECIAL, SPECIAL, 7), (EOS,)]


def test_E9_a_warm_up_that_may_say_nothing_is_not_repeated() -> None:
    seen = run([EOS], RETRY, max_tokens=0)
    assert (seen.attempts, seen.emitted, seen.finish) == (1, [], Finish.LENGTH)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("plain was asked for", {"speculative": False}, id="E10"),
        pytest.param("no drafter", {"speculative": False}, id="E11"),
    ],
)
def test_what_was_not_drafted_is_not_repeated(case: str, options: dict) -> None:
    seen = run([EOS], RETRY, **options)
    assert (seen.attempts, seen.emitted, seen.finish) == (1, [EOS], Finish.STOP), case


def policy() -> Policy:
    return Policy(max_tokens=20, stop_ids=STOPS, recovery=RETRY, words=WORDS)


def test_E12_a_failure_is_not_repeated() -> None:
    state, effects = advance(State(), Prefilled(0, finite=False), policy())
    assert (state.phase, effects.finish, effects.restart) == (Phase.DONE, Finish.ERROR, None)


def test_E13_a_request_cancelled_before_its_first_token_is_not_repeated() -> None:
    state, effects = advance(State(), Cancelled(), policy())
    assert (effects.finish, effects.restart, effects.emit) == (Finish.CANCELLED, None, ())
    assert advance(state, Prefilled(EOS), policy())[1].restart is None


def test_E14_a_retry_that_is_empty_too_ends_the_request() -> None:
    seen = run([EOS], RETRY, say_again=says([EOS]))
    assert (seen.attempts, seen.finish, seen.emitted) == (2, Finish.STOP, [EOS])
    assert seen.notes == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}


def test_E15_a_retry_that_fails_fails_the_request() -> None:
    state, effects = advance(State(), Prefilled(EOS), policy())
    assert effects.restart is Restart.SAVED
    state, _ = advance(state, Prefilled(7), policy())
    state, effects = advance(state, Stepped((), finite=False), policy())
    assert (effects.finish, effects.restart) == (Finish.ERROR, None)


def test_E16_the_retry_keeps_what_the_first_attempt_learnt_of_the_drafter() -> None:
    seen = run([SPECIAL] * 9 + [EOS], RETRY, accepts=[3], say_again=says([42, 43, EOS]))
    assert seen.state.drafting.drafted == 7 * seen.drafted_steps == 7 * 3
    assert seen.state.drafting.accepted == 9 - 3
    assert seen.state.ran
    assert seen.plain_steps == 2


def test_E16_times_of_both_attempts_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sequences, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    asked = Request(prompt=(1,), stop_ids=STOPS, recovery=RETRY, words=WORDS)
    request = sequences.Sequence(asked, None)
    heard = [
        (1.5, Prefilled(SPECIAL)),
        (1.7, Stepped((EOS,), num_drafts=3)),
        (1.7, Prefilled(42)),  # from the saved state
        (2.1, Stepped((43,))),
        (2.2, Cancelled()),
    ]
    now[0] = 1.0
    request.start()
    for now[0], event in heard:
        request.take(event)
    assert request.result().token_ids == [42, 43]
    assert request.stats.prefill_s == pytest.approx(0.5)
    assert request.stats.decode_s == pytest.approx(0.2 + 0.4)


def test_E17_a_loop_nobody_saw_still_counts_as_one() -> None:
    looping = recovery(empty_retry=True, runaway=True)
    seen = run([SPECIAL] * 40, looping, say_again=says([42, EOS]))
    assert seen.attempts == 2
    assert seen.notes["runaway"] == 1


def test_E19_a_restored_prompt_is_fed_afresh_when_the_cheap_retry_is_empty_too() -> None:
    empty, full = says([EOS]), says([42, EOS])

    class Cached(Device):
        """Whose restored state says nothing, and whose fresh one does."""

        def hear_first(self) -> None:
            self.say = empty if self.seen.prefills == 1 else full
            super().hear_first()

    made = Policy(max_tokens=9, stop_ids=STOPS, recovery=RETRY)
    seen = Cached(empty, made, say_again=empty, restored=True).run()
    assert [e.restart for e in seen.effects if e.restart] == [Restart.SAVED, Restart.FRESH]
    assert (seen.prefills, seen.attempts, seen.emitted) == (2, 3, [42, EOS])
    assert seen.notes == {"empty_retry": 2, "empty_retry_recovered": 1}


def test_E21_a_stop_string_is_an_end_of_its_own() -> None:
    state, _ = advance(State(), Prefilled(7), policy())
    state, effects = advance(state, Cancelled(Finish.STOP), policy())
    assert (effects.finish, effects.restart) == (Finish.STOP, None)
