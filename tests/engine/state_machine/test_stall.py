"""S: end tokens below the floor, stalls, and the tool calls that are forced in their place."""

import dataclasses
import random

import pytest
from fake_device import (
    BEST,
    CHAT_EOS,
    COLON,
    END_FUNCTION,
    END_THINK,
    EOS,
    FUNCTION,
    MENTION,
    PREFIX,
    SLIP,
    SPECIAL,
    STALL,
    STOPS,
    THINK,
    UNKNOWN,
    VOCABULARY,
    Device,
    both,
    recovery,
    run,
    scripted,
)

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.controller import (
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.forced_calls import split_names
from dflash_jax.engine.state_machine.request_state import choices, room, speculates

RULES = recovery(**STALL)


def injected(emitted: list[int]) -> bool:
    return any(tuple(emitted[i : i + 3]) == PREFIX for i in range(len(emitted)))


@pytest.mark.parametrize(
    ("script", "settings", "expected"),
    [
        pytest.param([10, COLON, EOS], RULES, True, id="S1"),
        pytest.param([10, COLON, EOS], recovery(**STALL | {"floor": 0}), False, id="S9"),
        pytest.param([10, COLON, EOS], recovery(floor=64), False, id="S10"),
        pytest.param([10, COLON, CHAT_EOS], RULES, True, id="S13"),
        pytest.param([THINK, COLON, EOS], RULES, False, id="S19"),
        pytest.param([FUNCTION, COLON, EOS], RULES, False, id="S20"),
        pytest.param([FUNCTION, END_FUNCTION, COLON, EOS], RULES, False, id="S21"),
        pytest.param([FUNCTION, 10, END_FUNCTION, COLON, EOS], RULES, False, id="S21-broken"),
        pytest.param([10, COLON, 46, SLIP, 46, COLON, EOS], RULES, False, id="another-form"),
        pytest.param([MENTION, COLON, EOS], RULES, True, id="a-tag-that-is-text"),
        pytest.param([THINK, FUNCTION, END_THINK, COLON, EOS], RULES, True, id="in-a-thought"),
        pytest.param([10, 59, EOS], RULES, True, id="S22"),
        pytest.param([10, COLON, 10, 46, EOS], RULES, False, id="S23"),
        pytest.param([10, 57, EOS], RULES, True, id="S24"),
        pytest.param([UNKNOWN, END_FUNCTION, EOS], RULES, False, id="no-such-tool"),
        pytest.param(
            [10, 46, UNKNOWN, END_FUNCTION, EOS], RULES, False, id="text-and-no-such-tool"
        ),
        pytest.param([UNKNOWN, END_FUNCTION, COLON, EOS], RULES, False, id="and-announced-more"),
        pytest.param([UNKNOWN, END_FUNCTION, 10, EOS], RULES, False, id="no-such-tool-then-text"),
        pytest.param([UNKNOWN, EOS], RULES, False, id="no-such-tool-not-ended"),
        pytest.param(
            [FUNCTION, END_FUNCTION, UNKNOWN, END_FUNCTION, EOS], RULES, False, id="one-of-two"
        ),
    ],
)
def test_which_ends_are_stalls(script: list[int], settings: Recovery, expected: bool) -> None:
    """A call to an undeclared tool is passed on, so an output that ends with one is no stall."""
    seen = both(script, settings)
    assert injected(seen.emitted) is expected
    assert seen.notes["tool_prefix"] == expected
    before = script[:-1]
    assert seen.emitted[: len(before)] == before
    if expected:
        assert tuple(seen.emitted[len(before) : len(before) + 3]) == PREFIX
    else:
        assert seen.emitted[len(before) :] in ([EOS], [CHAT_EOS])
        assert seen.finish is Finish.STOP


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param([50, 51, 46, COLON], False, id="ends with it"),
        pytest.param([50, 51, 46, 52, COLON], True, id="an announcement follows"),
        pytest.param([50, 10, COLON], True, id="S8"),
    ],
)
def test_only_an_output_that_ends_with_the_skip_phrase_is_complete(
    script: list[int], expected: bool
) -> None:
    assert injected(both([*script, EOS], RULES).emitted) is expected


@pytest.mark.parametrize(
    ("length", "replaced"), [pytest.param(5, False, id="S11"), pytest.param(4, True, id="S12_S25")]
)
def test_an_invisible_output_does_not_end_below_the_floor(length: int, replaced: bool) -> None:
    script = [SPECIAL] * length + [EOS, 11, EOS]
    seen = both(script, recovery(floor=5))
    wanted = [SPECIAL] * length + ([BEST, 11, EOS] if replaced else [EOS])
    assert seen.emitted == wanted
    assert seen.notes["floor"] == replaced


def test_S14_tokens_after_the_end_in_a_block_are_discarded() -> None:
    seen = run([10, 11, COLON, EOS, 12], RULES, accepts=[7], max_tokens=40)
    assert seen.emitted[:6] == [10, 11, COLON, *PREFIX]
    assert seen.emitted.count(11) == 1
    assert 12 not in seen.emitted


def test_S15_the_position_counts_the_fed_tokens() -> None:
    policy = Policy(max_tokens=40, stop_ids=STOPS, recovery=RULES, vocabulary=VOCABULARY)
    state, _ = advance(State(), Prefilled(10), policy)
    state, effects = advance(state, Stepped((11, COLON, EOS)), policy)
    assert (effects.emit, effects.replace, effects.force) == ((11, COLON, *PREFIX), 900, (901, 902))
    assert (
        state.num_computed == 3 + 2
    )  # 10, 11 and the colon by the step, 900 and 901 as forced tokens
    assert state.ids[state.num_computed :] == (902,)  # pending


def test_S17_a_call_needs_room_for_its_arguments() -> None:
    script = [10, COLON, EOS]
    tight = both(script, RULES, max_tokens=2 + 3 + 15)
    assert (tight.emitted, tight.finish) == (script, Finish.STOP)
    assert tight.notes == {"floor_waived": 1}
    assert injected(both(script, RULES, max_tokens=2 + 3 + 16).emitted)


def test_S18_one_call_is_begun_per_request() -> None:
    script = [10, COLON, EOS, 0, 0, COLON, EOS, 11]
    seen = both(script, RULES)
    assert seen.emitted == [10, COLON, *PREFIX, COLON, EOS]


def test_S4_S28_the_floor_applies_to_the_first_token() -> None:
    assert both([EOS, 11, EOS], recovery(floor=2)).emitted == [BEST, 11, EOS]


def test_short_answers_are_kept() -> None:
    assert both([10, EOS], RULES).emitted == [10, EOS]


def test_S30_non_finite_logits_fail_the_request() -> None:
    policy = Policy(max_tokens=9, stop_ids=STOPS, recovery=recovery(floor=5))
    _, effects = advance(State(), Prefilled(EOS, 0, finite=False), policy)
    assert (effects.finish, effects.emit, effects.replace) == (Finish.ERROR, (), None)


def test_S31_the_floor_does_not_exceed_the_length_limit() -> None:
    invisible = lambda ids: SPECIAL  # noqa: E731
    seen = both([EOS] * 60, recovery(floor=50), max_tokens=10, floor=invisible)
    assert (seen.emitted, seen.finish) == ([SPECIAL] * 10, Finish.LENGTH)


def test_S32_non_finite_drafts_neither_lose_nor_repeat_tokens() -> None:
    script = [*range(10, 40), EOS]
    seen = run(script, draft_finite=lambda step: step < 1)
    assert seen.emitted == script
    assert seen.fallbacks == {"draft_not_finite": 3}
    assert seen.plain_steps > 20


def test_S33_with_all_rules_off_decided_tokens_are_emitted_as_they_are() -> None:
    """The output ends after a stop token or at the limit, and nothing else happens."""
    for seed in range(200):
        rng = random.Random(seed)
        script = [rng.choice([EOS, COLON, COLON, SPECIAL, *range(10, 16)]) for _ in range(60)]
        limit = rng.randint(1, 50)
        stops = [i for i, token in enumerate(script[:limit]) if token in STOPS]
        wanted = script[: stops[0] + 1] if stops else script[:limit]
        accepts = [rng.randrange(8) for _ in range(9)]
        seen = run(script, OFF, max_tokens=limit, accepts=accepts)
        assert seen.emitted == wanted
        assert seen.finish is (Finish.STOP if stops else Finish.LENGTH)
        assert not seen.notes
        assert all(e.replace is None and not e.force and not e.restart for e in seen.effects)


def test_S34_an_end_token_inside_an_accepted_block_is_not_fed() -> None:
    seen = run([10, 11, 12, 13, EOS, 14, 15, 16, 17], accepts=[7])
    assert seen.emitted == [10, 11, 12, 13, EOS]
    assert seen.fed == [10, 11, 12, 13]
    assert seen.state.num_computed == 4


def test_S36_nothing_is_computed_after_a_pending_end_token() -> None:
    seen = run([EOS])
    assert (seen.drafted_steps, seen.plain_steps, seen.finish) == (0, 0, Finish.STOP)


def test_S37_a_call_is_forced_without_a_further_step() -> None:
    colon_first = Device(
        scripted([COLON, EOS]),
        Policy(max_tokens=40, stop_ids=STOPS, recovery=RULES, vocabulary=VOCABULARY),
        accepts=[0],
    )
    seen = colon_first.run()
    assert seen.effects[1].emit == PREFIX  # the step's own token, the end, was replaced
    assert seen.effects[1].replace == PREFIX[0]


def test_drafting_continues_after_a_forced_call() -> None:
    seen = run([10, COLON, EOS], RULES, max_tokens=60)
    assert seen.plain_steps == 0
    assert seen.drafted_steps > 10


# Three tools: after the shared beginning 900 the first differs from the others, which differ
# again after 911.
NAMES = ((900, 901, 902), (900, 910, 911, 912, 913), (900, 910, 911, 920, 921))
NAMED = dataclasses.replace(VOCABULARY, calls=NAMES)


@pytest.mark.parametrize(
    ("next_tokens", "begun"),
    [
        pytest.param([901], NAMES[0], id="its-own-choice"),
        pytest.param([910, 920], NAMES[2], id="its-own-choice-twice"),
        pytest.param([10], NAMES[1], id="no-such-name"),  # the device's best: 910, then 912
        pytest.param([EOS], NAMES[1], id="an-end-token"),
        pytest.param([910, EOS], NAMES[1], id="an-end-token-within-the-name"),
        pytest.param([910, 901], NAMES[1], id="another-tools-token"),
    ],
)
def test_the_target_chooses_among_declared_tools(
    next_tokens: list[int], begun: tuple[int, ...]
) -> None:
    """For any choice of the target where the names differ, and for blocks of any width."""
    script = [10, COLON, EOS, *[50] * 10]
    script[3], script[5] = next_tokens[0], next_tokens[-1]  # where the names differ
    best = {frozenset({901, 910}): 910, frozenset({912, 920}): 912}
    seen = both(
        script,
        RULES,
        vocabulary=NAMED,
        max_tokens=40,
        prefer=lambda _, of: best[frozenset(of)],
    )
    assert tuple(seen.emitted[2 : 2 + len(begun)]) == begun
    assert seen.notes == {"tool_prefix": 1}
    assert seen.emitted[2 + len(begun) :][:2] == script[2 + len(begun) :][:2]


def test_a_tool_name_is_decided_token_by_token_without_drafts() -> None:
    policy = Policy(max_tokens=60, stop_ids=STOPS, recovery=RULES, vocabulary=NAMED)
    state, _ = advance(State(), Prefilled(10), policy)
    state, effects = advance(state, Stepped((COLON, EOS)), policy)
    assert (effects.replace, effects.force) == (900, ())
    assert choices(state) == (901, 910)
    assert room(state, policy) == state.num_decided + 1
    assert not speculates(state, policy)
    state, effects = advance(state, Stepped((77,), replacement_token=910), policy)
    assert (effects.replace, effects.force) == (910, (911,))
    assert choices(state) == (912, 920)
    state, effects = advance(state, Stepped((920,), replacement_token=920), policy)
    assert (effects.replace, effects.force) == (None, (921,))
    assert (choices(state), room(state, policy)) == ((), 60)
    assert speculates(state, policy)


def test_a_call_needs_room_for_the_longest_name() -> None:
    script = [10, COLON, EOS]
    longest = max(map(len, NAMES))
    tight = both(script, RULES, vocabulary=NAMED, max_tokens=2 + longest + 15)
    assert (tight.emitted, tight.notes) == (script, {"floor_waived": 1})
    enough = both(script, RULES, vocabulary=NAMED, max_tokens=2 + longest + 16)
    assert enough.notes == {"tool_prefix": 1}


@pytest.mark.parametrize(
    ("calls", "shared", "rest"),
    [
        ((), (), ()),
        (((1, 2),), (1, 2), ()),
        (((1, 2), (1, 2)), (1, 2), ()),
        (((1, 2, 3), (1, 2, 4)), (1, 2), ((3,), (4,))),
        (((1, 2), (3,)), (), ((1, 2), (3,))),
        (((1, 2), (1, 2, 3)), (1, 2), ()),  # one ends where the other continues
        (((1,), (1, 2), (1, 3)), (1,), ()),
    ],
)
def test_split_returns_the_shared_beginning_of_calls(
    calls: tuple[tuple[int, ...], ...],
    shared: tuple[int, ...],
    rest: tuple[tuple[int, ...], ...],
) -> None:
    assert split_names(calls) == (shared, rest)


def test_a_forced_call_ends_at_an_end_token_among_its_ids() -> None:
    vocabulary = dataclasses.replace(VOCABULARY, calls=((900, EOS, 10), (900, 11, 11)))
    seen = both([COLON, EOS, EOS], RULES, vocabulary=vocabulary)
    assert seen.emitted == [COLON, 900, EOS]
    assert seen.finish is Finish.STOP
