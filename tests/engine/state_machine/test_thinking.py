"""K: a thought that lasts too long is closed with the whole closing sequence, in every mode."""

from pathlib import Path

import pytest
from fake_device import (
    BEST,
    COLON,
    END_THINK,
    EOS,
    PREFIX,
    STALL,
    STOPS,
    THINK,
    VOCABULARY,
    both,
    recovery,
    run,
)

import dflash_jax
from dflash_jax.engine.state_machine.controller import (
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.request_state import room
from dflash_jax.engine.vocabulary import vocabulary_of
from dflash_jax.tokenizer import Tokenizer

ONE = (END_THINK,)
TWELVE = (800, 801, 802, 803, END_THINK, 805, 806, 807, 808, 809, 810, 811)
RESERVE = recovery(answer_reserve=30)


def closing(close: tuple[int, ...]) -> OutputVocabulary:
    return OutputVocabulary(**vars(VOCABULARY) | {"close": close})


@pytest.mark.parametrize(
    "close",
    [pytest.param(ONE, id="K1"), pytest.param(TWELVE, id="K2"), pytest.param((1, 5), id="two")],
)
def test_the_whole_closing_sequence_appears_once(close: tuple[int, ...]) -> None:
    seen = both([THINK], RESERVE, vocabulary=closing(close), max_tokens=50)
    assert seen.emitted[20 : 20 + len(close)] == list(close)
    assert sum(token in close for token in seen.emitted) == len(close)
    assert len(seen.emitted) == 50
    assert seen.finish is Finish.LENGTH
    assert seen.notes == {"thought_closed_by_force": 1}
    assert seen.emitted[20 + len(close)] == 1000 + 20 + len(close)  # the model continues freely


def test_K3_the_position_moves_once_where_a_block_reaches_the_limit() -> None:
    policy = Policy(max_tokens=50, stop_ids=STOPS, recovery=RESERVE, vocabulary=closing(TWELVE))
    state, _ = advance(State(), Prefilled(THINK), policy)
    state, _ = advance(state, Stepped(tuple(range(100, 117))), policy)
    assert room(state, policy) == 21
    state, effects = advance(state, Stepped((117, 118, 119)), policy)
    assert (effects.emit, effects.replace, effects.force) == ((117, 118, *TWELVE), 800, TWELVE[1:])
    assert state.num_computed == len(state.ids) - 1 == 20 + 11
    assert room(state, policy) == 50


def test_K4_a_thought_that_closes_itself_at_the_limit_is_not_closed_twice() -> None:
    script = [THINK, *[10] * 19, END_THINK, 5, EOS]
    seen = both(script, RESERVE, vocabulary=closing(ONE), max_tokens=50)
    assert seen.emitted == script
    assert seen.notes == {"thought_closed": 1}


def test_K5_a_thought_that_closed_before_the_limit_is_left_alone() -> None:
    script = [THINK, *[10] * 9, END_THINK, *[11] * 30, EOS]
    seen = both(script, RESERVE, vocabulary=closing(TWELVE), max_tokens=60)
    assert seen.emitted == script
    assert not seen.notes


@pytest.mark.parametrize(("limit", "at"), [(30, 15), (10, 5), (2, 1)])
def test_K6_a_reserve_larger_than_the_request_is_half_of_it(limit: int, at: int) -> None:
    seen = both([THINK], RESERVE, vocabulary=closing(ONE), max_tokens=limit)
    assert seen.emitted[at] == END_THINK
    assert seen.emitted.count(END_THINK) == 1
    assert len(seen.emitted) == limit


def test_a_request_of_one_token_has_no_room_to_close_anything() -> None:
    assert both([THINK], RESERVE, vocabulary=closing(ONE), max_tokens=1).emitted == [THINK]


def test_a_closing_sequence_is_cut_at_the_length_limit() -> None:
    seen = both([THINK], recovery(answer_reserve=4), vocabulary=closing(TWELVE), max_tokens=20)
    assert seen.emitted[16:] == list(TWELVE[:4])
    assert seen.finish is Finish.LENGTH


def test_the_text_that_closes_a_thought_is_a_setting() -> None:
    tokenizer = Tokenizer.from_directory(Path(dflash_jax.__file__).parent / "data/tiny/target")
    assert tokenizer is not None
    known = vocabulary_of(
        tokenizer, (), recovery(answer_reserve=9, close_text="Enough."), None, None
    )
    assert tokenizer.raw(known.close) == "Enough."
    own = vocabulary_of(tokenizer, (), recovery(answer_reserve=9), None, None)
    assert "</think>" in tokenizer.raw(own.close)


def test_an_end_inside_a_thought_may_be_replaced_in_place_of_closing_it() -> None:
    script = [THINK, 10, EOS, 11, EOS]
    closed = both(script, recovery(floor=4), vocabulary=closing(ONE))
    assert closed.emitted == [THINK, 10, END_THINK, 11, EOS]
    replaced = both(script, recovery(floor=4, floor_in_thought=True), vocabulary=closing(ONE))
    assert replaced.emitted == [THINK, 10, BEST, 11, EOS]


def test_a_thought_opened_by_the_prompt_is_closed() -> None:
    vocabulary = OutputVocabulary(**vars(closing(ONE)) | {"inside_thought": True})
    assert both([10], RESERVE, vocabulary=vocabulary, max_tokens=50).emitted[20] == END_THINK


def test_an_end_token_at_the_limit_of_a_thought_is_replaced() -> None:
    seen = both([THINK, *[10] * 19, EOS, 7, EOS], RESERVE, vocabulary=closing(ONE), max_tokens=50)
    assert seen.emitted == [THINK, *[10] * 19, END_THINK, 7, EOS]


@pytest.mark.parametrize("before", range(14, 20))
def test_a_call_forced_across_the_limit_of_thoughts_continues(before: int) -> None:
    settings = recovery(**STALL | {"answer_reserve": 30})
    script = [*[11] * before, COLON, EOS]
    seen = both(script, settings, vocabulary=closing(TWELVE), max_tokens=50)
    assert seen.emitted[: before + 4] == [*script[:-1], *PREFIX]
    assert len(seen.emitted) == 50
    assert seen.notes == {"tool_prefix": 1}


def test_K7_the_first_step_feeds_the_first_output_token() -> None:
    seen = run([10, 11, EOS], speculative=False)
    assert seen.fed == [10, 11]


def test_K8_a_change_of_decode_mode_feeds_no_token_twice() -> None:
    seen = run([*range(10, 40), EOS], draft_finite=lambda step: step not in (1, 2, 3))
    assert seen.drafted_steps
    assert seen.plain_steps
    assert seen.fed == list(range(10, 40))
