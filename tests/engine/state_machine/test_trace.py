"""Where each token comes from, whatever recovery holds, drops, replaces and forces.

That the trace has exactly the emitted tokens is asserted by `fake_device` for every other test.
"""

import dataclasses
from typing import Any

import pytest
from fake_device import BEST, EOS, SPECIAL, VOCABULARY, Outcome, recovery, run, scripted

from dflash_jax.engine.state_machine.controller import Cancelled, Prefilled, Stepped
from dflash_jax.engine.state_machine.trace import CallTime, TraceRecorder
from tests.engine.state_machine.test_call_retry import BAD, CALLS, CLOSE, OPEN, RETRY, RIGHT
from tests.engine.state_machine.test_odds import CALL, LEAD, LIKELY, ODDS, PROBED, UNLIKELY, odds

D, T, F = "drafted", "target", "forced"


def sources(seen: Outcome) -> list[tuple[int, str]]:
    return [pair for x in seen.trace for pair in zip(x.tokens, x.sources, strict=True)]


@pytest.mark.parametrize("speculative", [True, False])
def test_rounds_without_recovery(speculative: bool) -> None:
    seen = run(range(10, 16), max_tokens=6, speculative=speculative, accepts=[2])
    rounds = [(x.tokens, x.sources, x.proposed, x.accepted) for x in seen.trace]
    if speculative:
        assert rounds == [
            ((10,), (T,), 0, 0),
            ((11, 12, 13), (D, D, T), 7, 2),
            ((14, 15), (D, T), 7, 1),
        ]
    else:
        assert rounds == [((token,), (T,), 0, 0) for token in range(10, 16)]


def test_a_replaced_end_token_is_forced() -> None:
    seen = run([10, 11, EOS, 12, EOS], recovery(min_tokens=4), accepts=[1])
    assert sources(seen) == [(10, T), (11, D), (BEST, F), (12, D), (EOS, T)]


def test_a_forced_call_is_forced_and_its_tool_is_the_target_s_choice() -> None:
    seen = run([52, EOS, 0, 0, 0, 903, 7, EOS], ODDS, vocabulary=PROBED, odds=odds(LIKELY, 0.0))
    assert seen.notes["tool_prefix"] == 1
    assert sources(seen)[:3] == [(52, T), (LEAD, F), (CALL, F)]
    assert {source for _, source in sources(seen)[:4]} == {T, F}


def test_an_end_token_that_was_probed_in_vain_is_the_target_s() -> None:
    for script in ([10, 46, 52, EOS], [52, EOS]):
        seen = run(script, ODDS, vocabulary=PROBED, odds=odds(LIKELY, UNLIKELY))
        assert seen.plain_steps
        assert sources(seen)[-1] == (EOS, T)
        assert F not in {source for _, source in sources(seen)}


def test_a_marker_of_several_tokens_that_was_probed_in_vain_leaves_no_round() -> None:
    vocabulary = dataclasses.replace(
        VOCABULARY, calls=((LEAD, 81, 82, 83, 900),), opening=(LEAD, 81, 82, 83)
    )
    table = {LEAD: 0.0, 81: 0.0, 82: 0.0, 83: -90.0}
    seen = run(
        [11, 46, 52, EOS], ODDS, vocabulary=vocabulary, odds=lambda ids, wanted: table[wanted]
    )
    assert [token for token, _ in sources(seen)] == seen.emitted == [11, 46, 52, EOS]
    assert sources(seen)[-1] == (EOS, T)


def test_a_thought_is_closed_by_force() -> None:
    vocabulary = dataclasses.replace(VOCABULARY, close=(61, 10))
    seen = run(
        [60, *range(20, 40)], recovery(answer_reserve=4), vocabulary=vocabulary, max_tokens=10
    )
    found = sources(seen)
    assert [source for token, source in found if token == 61] == [F]
    assert {source for token, source in found if token >= 1000} <= {D, T}


def test_a_call_that_is_decoded_again_leaves_no_round_of_the_first() -> None:
    seen = run(
        [5, 6, OPEN, BAD, CLOSE, EOS],
        RETRY,
        vocabulary=CALLS,
        odds=lambda ids, _: -20.0,
        retry_target=scripted([5, 6, *RIGHT]),
        accepts=[2],
    )
    assert sources(seen) == [(5, T), (6, D), *zip(RIGHT, (D, D, T, T), strict=True)]
    assert [x.accepted for x in seen.trace] == [0, 2, 2, 0]
    assert sum(x.seconds for x in seen.trace) == pytest.approx(len(seen.effects))


def test_an_answer_that_is_decoded_again_has_the_rounds_of_the_second_only() -> None:
    again = recovery(empty_retry=True)
    seen = run([SPECIAL] * 3 + [EOS], again, retry_target=scripted([42, 43, EOS]), accepts=[3])
    assert sources(seen) == [(42, T), (43, T), (EOS, T)]
    assert sum(x.seconds for x in seen.trace) == pytest.approx(len(seen.effects))


def recorded(*steps: Any, drafts: tuple[int, ...] = (), **more: Any) -> TraceRecorder:
    recorder = TraceRecorder()
    for event, new in steps:
        given = {"retracted": 0, "time": CallTime(4.0), "drafts": drafts} | more
        recorder.record(event, new, **given)
    return recorder


@pytest.mark.parametrize(
    ("decided", "new", "rejected"),
    [
        ((1, 2, 9), (1, 2, 9), (3, 4)),  # a mismatch
        ((1, 2), (1, 2), ()),  # an end token or a limit, which the draft proposed as well
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), ()),
        ((1, 2, 9), (1, 2, 8), (3, 4)),  # the end token was replaced
        ((1, 2, 9), (1, 2), ()),  # the output ended before the mismatch
        ((9,), (9,), (1, 2, 3, 4)),
    ],
)
def test_drafts_are_rejected_from_the_first_mismatch_on(
    decided: tuple[int, ...], new: tuple[int, ...], rejected: tuple[int, ...]
) -> None:
    step = Stepped(decided, num_drafts=4)
    [traced] = recorded((step, new), drafts=(1, 2, 3, 4)).emit(len(new))
    assert traced.rejected == rejected
    assert traced.accepted == len(decided) - 1
    assert traced.sources.count(D) == min(traced.accepted, len(new))


def test_an_output_that_ends_inside_a_round_has_no_token_after_its_end() -> None:
    recorder = recorded((Stepped((1, 2, 3), num_drafts=4), (1, 2, 3)), drafts=(1, 2, 9, 8))
    assert recorder.emit(2) == []
    [traced] = recorder.finish()
    assert (traced.tokens, traced.sources, traced.rejected) == ((1, 2), (D, D), ())
    assert recorder.finish() == []


def test_rounds_of_a_call_share_its_time() -> None:
    recorder = TraceRecorder()
    recorder.begin(1.0)
    given: dict[str, Any] = {"retracted": 0, "drafts": ()}
    recorder.record(Prefilled(1), (1,), time=CallTime(3.0), **given)
    for left in (3, 2, 1):
        recorder.record(Stepped((1,)), (1,), time=CallTime(9.0, left), **given)
    assert [traced.seconds for traced in recorder.emit(4)] == [2.0] * 4


def test_a_token_that_a_grammar_determined_is_forced_unless_it_was_drafted() -> None:
    recorder = recorded((Stepped((1, 2), num_drafts=1), (1, 2)), (Stepped((3,)), (3,)))
    assert recorder.emit(1) == []
    for place in range(2):
        recorder.force(place)
    assert [x.sources for x in recorder.emit(2)] == [(D, F), (F,)]


def test_a_cancelled_output_drops_what_is_held() -> None:
    recorder = recorded((Stepped((1, 2)), (1, 2)))
    recorder.record(Cancelled(), (), retracted=2, drafts=(), time=CallTime(5.0))
    assert recorder.emit(0) == recorder.finish() == []
