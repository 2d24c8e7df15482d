"""O: stalls judged by the target's own odds of a call."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import BEST, COLON, EOS, STALL, THINK, VOCABULARY, Outcome, both, recovery, run

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.announcements import introduces_call
from dflash_jax.engine.state_machine.controller import (
    Cancelled,
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.request_state import opening, room, speculates
from dflash_jax.errors import ConfigError
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import Tool

LEAD, CALL = 80, 81
FIRST, SECOND = (LEAD, CALL, 900, 901), (LEAD, CALL, 900, 902, 903)
PROBED = dataclasses.replace(VOCABULARY, calls=(FIRST, SECOND), opening=(LEAD, CALL), close=(61,))
ODDS = recovery(**STALL)
SAID = 52  # an announcement
LIKELY, UNLIKELY = -1.0, -26.0

Odds = Callable[[tuple[int, ...], int], float]


def odds(lead: float, call: float) -> Odds:
    """Return a target that reports these odds for the lead to a call, and for the call."""
    return lambda ids, wanted: {LEAD: lead, CALL: call}[wanted]


def ended(script: list[int], lead: float, call: float, **options: Any) -> Outcome:
    given: dict[str, Any] = {"settings": ODDS, "vocabulary": PROBED} | options
    return both([*script, EOS], odds=odds(lead, call), **given)


def is_call(seen: Outcome, script: list[int]) -> bool:
    """Return whether a declared call was forced after the script; otherwise nothing may change."""
    forced = seen.emitted[len(script) :]
    if seen.notes["tool_prefix"]:
        assert forced[: len(FIRST)] == list(FIRST) or forced[: len(SECOND)] == list(SECOND)
        return True
    assert seen.emitted == [*script, EOS]
    assert seen.finish is Finish.STOP
    assert not seen.notes
    return False


@pytest.mark.parametrize(
    "script",
    [[SAID], [SAID, 46], [SAID, COLON], [*[10] * 99, 46, SAID], [*[10] * 99, 46, SAID, 46]],
)
def test_O1_an_end_becomes_a_call_where_the_target_wants_one(script: list[int]) -> None:
    """Also above the floor."""
    assert is_call(ended(script, LIKELY, 0.0), script)


@pytest.mark.parametrize("script", [[SAID], [SAID, 46], [SAID, COLON]])
@pytest.mark.parametrize(("lead", "call"), [(UNLIKELY, 0.0), (LIKELY, UNLIKELY), (-12.75, -12.75)])
def test_O2_an_answer_stays_as_it_is_where_the_target_wants_no_call(
    script: list[int], lead: float, call: float
) -> None:
    """Also after a probe, whose forced tokens are dropped before they are emitted."""
    assert not is_call(ended(script, lead, call), script)


def test_O3_a_probe_takes_one_step_and_runs_only_where_a_call_is_likely() -> None:
    plain = {"settings": ODDS, "vocabulary": PROBED, "speculative": False}
    steps = {}
    for name, lead, call in (("never", UNLIKELY, 0.0), ("probed", LIKELY, UNLIKELY)):
        steps[name] = run([SAID, 46, EOS], odds=odds(lead, call), **plain).plain_steps
    assert steps == {"never": 2, "probed": 3}


@pytest.mark.parametrize(
    ("text", "between"),
    [
        pytest.param("Now the file:", (-7, -9), id="colon"),
        pytest.param("and then...", (-7, -9), id="ellipsis"),
        pytest.param("and then \N{EM DASH}", (-7, -9), id="dash"),
        pytest.param("All good. Let me look at it.", (-24, -26), id="announcement"),
        pytest.param("All good. Let me frobnicate it.", (-12, -14), id="unknown verb"),
        pytest.param("Is it so? I'll look.", (-21, -23), id="announcement after a question"),
        pytest.param("Which one? Name it:", (-4, -6), id="question and colon"),
        pytest.param("Let me see:\n```\nx", (-21, -23), id="open fence"),
    ],
)
def test_O4_the_cue_moves_the_odds_threshold(text: str, between: tuple[float, float]) -> None:
    vocabulary = dataclasses.replace(PROBED, text=lambda ids: text if 10 in ids else "")
    enough, little = between
    assert is_call(ended([10], enough, 0.0, vocabulary=vocabulary), [10])
    assert not is_call(ended([10], little, 0.0, vocabulary=vocabulary), [10])


@pytest.mark.parametrize(
    "text",
    [
        "done.",
        "Yes.",
        "Done. The port is now 8080.",
        "Let me know if you need more.",
        "Which one?",
        "in\n```\nx",
        "the `x",
        "the line `def f(x):`",
        "I'll run it once you confirm.",
        "Let me run it. All done.",
    ],
)
def test_O17_without_a_cue_no_odds_suffice(text: str) -> None:
    vocabulary = dataclasses.replace(PROBED, text=lambda ids: text if 10 in ids else "")
    assert not is_call(ended([10], 9.0, 0.0, vocabulary=vocabulary), [10])


MARKED = dataclasses.replace(
    VOCABULARY, calls=((LEAD, 81, 82, 83, 900), (LEAD, 81, 82, 83, 901)), opening=(LEAD, 81, 82, 83)
)


@pytest.mark.parametrize(
    ("odds_of_marker", "called"),
    [((0, 0, 0), True), ((-8, -8, -8), True), ((-9, -9, -9), False), ((0, 0, -26), False)],
)
def test_O18_all_tokens_of_a_marker_are_judged(
    odds_of_marker: tuple[float, ...], called: bool
) -> None:
    table = dict(zip((LEAD, 81, 82, 83), (0.0, *odds_of_marker), strict=True))
    seen = both([SAID, 46, EOS], ODDS, vocabulary=MARKED, odds=lambda ids, wanted: table[wanted])
    if called:
        assert seen.emitted[:6] == [SAID, 46, LEAD, 81, 82, 83]
        assert seen.emitted[6] in (900, 901)
        assert seen.notes == {"tool_prefix": 1}
    else:
        assert seen.emitted == [SAID, 46, EOS]
        assert not seen.notes


def test_O19_a_marker_is_given_up_at_its_first_unlikely_token() -> None:
    plain = {"settings": ODDS, "vocabulary": MARKED, "speculative": False}
    table = {LEAD: 0.0, 81: -30.0, 82: 0.0, 83: 0.0}
    seen = run([SAID, EOS], odds=lambda ids, wanted: table[wanted], **plain)
    assert (seen.plain_steps, seen.emitted) == (2, [SAID, EOS])


def test_O20_a_fenced_object_that_names_a_tool_becomes_a_call_whatever_the_odds() -> None:
    text = 'I will do it:\n```json\n{"name": "%s", "arguments": {"a": 1}}\n```'
    for name, called in (("w", True), ("x", False)):
        said = text % name
        vocabulary = dataclasses.replace(
            PROBED, text=lambda ids, said=said: said if 10 in ids else ""
        )
        assert is_call(ended([10], -90.0, 0.0, vocabulary=vocabulary), [10]) is called


def test_O5_odds_of_both_steps_add_up() -> None:
    script = [SAID, 46]
    assert is_call(ended(script, -12.0, -12.0), script)
    assert not is_call(ended(script, -13.0, -13.0), script)
    eager = dataclasses.replace(ODDS, tool_call_threshold=-8.0)
    assert is_call(ended(script, -13.0, -13.0, settings=eager), script)


def test_O6_a_family_whose_calls_begin_with_their_marker_needs_no_probe() -> None:
    calls = tuple(ids[1:] for ids in (FIRST, SECOND))
    vocabulary = dataclasses.replace(PROBED, calls=calls, opening=(CALL,))
    seen = ended([SAID, 46], 0.0, LIKELY, vocabulary=vocabulary)
    assert seen.notes["tool_prefix"] == 1
    assert tuple(seen.emitted[2:5]) in (calls[0], calls[1][:3])
    assert not ended([SAID, 46], 0.0, UNLIKELY, vocabulary=vocabulary).notes


def test_O7_without_odds_the_text_decides() -> None:
    def texts(end: str) -> OutputVocabulary:
        return dataclasses.replace(PROBED, text=lambda ids: end if 10 in ids else "")

    for end, stalled in (
        ("now:", True),
        ("now.", False),
        ("Let me see.", True),
        ("now...", False),
        ("What? Now:", False),
        ("`x:`", False),
    ):
        seen = both([10, EOS], ODDS, vocabulary=texts(end))
        assert bool(seen.notes["tool_prefix"]) is stalled, end


def test_O8_no_room_for_a_call_leaves_the_end() -> None:
    script = [SAID, 46]
    seen = ended(script, 0.0, 0.0, max_tokens=20)
    assert seen.emitted == [*script, EOS]
    assert seen.notes == {"floor_waived": 1}


def test_O9_blank_output_continues_with_the_next_best_token() -> None:
    blank = dataclasses.replace(
        PROBED,
        text=lambda ids: "".join("\n \N{ZERO WIDTH SPACE}" if i == 10 else "w" for i in ids),
    )
    seen = both([10, 10, EOS, 46, EOS], ODDS, vocabulary=blank, odds=odds(UNLIKELY, 0.0))
    assert seen.emitted == [10, 10, BEST, 46, EOS]
    assert seen.notes == {"floor": 1}


def test_O10_an_end_inside_a_thought_closes_it_once() -> None:
    seen = both([THINK, 10, EOS, 10, EOS], ODDS, vocabulary=PROBED, odds=odds(UNLIKELY, 0.0))
    assert seen.emitted == [THINK, 10, 61, 10, EOS]
    assert seen.notes == {"thought_closed_by_force": 1}
    twice = both([THINK, EOS, THINK, EOS], ODDS, vocabulary=PROBED, odds=odds(UNLIKELY, 0.0))
    assert twice.emitted == [THINK, 61, THINK, EOS]


def test_O21_a_fence_that_holds_a_call_is_the_call_where_fences_may() -> None:
    vocabulary = dataclasses.replace(
        PROBED,
        syntax=SYNTAXES["hermes"],
        tools=(Tool("w", {}),),
        text=lambda ids: '```json\n{"name": "w", "arguments": {}}\n```' if 10 in ids else "",
    )
    for fenced in (introduces_call, None):
        own = dataclasses.replace(vocabulary, fenced=fenced)
        assert is_call(ended([10], -90.0, 0.0, vocabulary=own), [10]) is (fenced is None)


def test_O11_an_output_does_not_end_after_a_fence_was_opened() -> None:
    vocabulary = dataclasses.replace(
        PROBED, text=lambda ids: "".join("x\n```py\n" if i == 10 else "code" for i in ids)
    )
    seen = both([10, EOS, 46, EOS], ODDS, vocabulary=vocabulary, odds=odds(UNLIKELY, 0.0))
    assert seen.emitted == [10, BEST, 46, EOS]


def test_O12_an_output_may_end_after_a_call() -> None:
    seen = both([62, 63, EOS], ODDS, vocabulary=PROBED, odds=odds(0.0, 0.0))
    assert seen.emitted == [62, 63, EOS]
    assert not seen.notes


@pytest.mark.parametrize("reason", [Finish.CANCELLED, Finish.LENGTH])
def test_O13_a_probe_is_never_emitted_when_the_request_ends_during_it(reason: Finish) -> None:
    policy = Policy(max_tokens=99, stop_ids=frozenset({EOS}), recovery=ODDS, vocabulary=PROBED)
    state, _ = advance(State(), Prefilled(SAID, BEST, tool_call_margin=0.0), policy)
    state, effects = advance(
        state, Stepped((46, EOS), replacement_token=BEST, tool_call_margin=LIKELY), policy
    )
    assert (effects.emit, effects.replace, effects.force) == ((46,), LEAD, ())
    assert opening(state, policy) == CALL
    assert room(state, policy) == state.num_decided + 1
    assert not speculates(state, policy)
    done, effects = advance(state, Cancelled(reason), policy)
    assert effects.finish is reason
    assert (effects.emit, effects.retract) == ((), 1)
    assert done.ids == (SAID, 46)


def test_O14_a_lead_that_contains_an_end_token_is_not_forced() -> None:
    stops = frozenset({EOS, LEAD})
    seen = ended([SAID, 46], 0.0, 0.0, stops=stops)
    assert seen.emitted == [SAID, 46, EOS]


def test_O15_no_odds_are_reported_where_no_end_token_is_judged() -> None:
    for settings in (OFF, dataclasses.replace(ODDS, floor=0)):
        policy = Policy(max_tokens=9, recovery=settings, vocabulary=PROBED)
        assert opening(State(), policy) == -1


@pytest.mark.parametrize("value", ["-4", None, float("nan"), True])
def test_O16_odds_that_are_no_number_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="tool_call_threshold is"):
        Recovery(tool_call_threshold=value)
