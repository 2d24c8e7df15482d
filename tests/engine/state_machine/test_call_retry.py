"""B: calls that cannot be parsed, or are incomplete, are decoded again from their opening."""

import dataclasses
from typing import Any

import pytest
from fake_device import COLON, EOS, STALL, TEXTS, VOCABULARY, Outcome, both, recovery, run, scripted

from dflash_jax.engine.state_machine.call_retry import LONGEST
from dflash_jax.engine.state_machine.controller import (
    CallRetried,
    Cancelled,
    Finish,
    Policy,
    Prefilled,
    Restart,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_reader import is_broken_call
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import Tool

OPEN, GOOD, BAD, CLOSE, THINK, END_THINK, OTHER = 81, 82, 83, 84, 60, 61, 85
MEANING = TEXTS | {
    OPEN: "<tool_call>",
    GOOD: '{"name": "w", "arguments": {}}',
    BAD: '{"name": "w", "arguments": {oops',
    OTHER: '{"name": "x", "arguments": {}}',
    CLOSE: "</tool_call>",
}
CALLS = dataclasses.replace(
    VOCABULARY,
    text=lambda ids: "".join(MEANING.get(i, "w") for i in ids),
    syntax=SYNTAXES["hermes"],
    tools=(Tool("w", {}),),
    calls=((80, OPEN, 900),),
    opening=(80, OPEN),
    marker=OPEN,
    closer=CLOSE,
    close=(END_THINK,),
)
RETRY = recovery(**STALL, call_retry=True)
RIGHT = [OPEN, GOOD, CLOSE, EOS]


def retried(script: list[int], then: list[int], **options: Any) -> Outcome:
    """Return the outcome, equal in all modes; `then` is the target's output under the grammar."""
    given: dict[str, Any] = {"settings": RETRY, "vocabulary": CALLS, "odds": lambda ids, _: -20.0}
    return both(script, retry_target=scripted(then), **given | options)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param([OPEN, BAD, CLOSE, EOS], id="malformed"),
        pytest.param([OPEN, BAD, CLOSE, 10, 10, 10, EOS], id="malformed, then text"),
        pytest.param([OPEN, CLOSE, EOS], id="empty"),
        pytest.param([OPEN, BAD, EOS], id="unfinished"),
        pytest.param([OPEN, EOS], id="opening alone"),
        pytest.param([OPEN, 10, 10, EOS], id="no call at all"),
    ],
)
@pytest.mark.parametrize(
    "before", [[], [10, 46], [10, COLON], [THINK, 10, END_THINK], [OPEN, GOOD, CLOSE]]
)
def test_B1_a_broken_call_is_decoded_again(before: list[int], broken: list[int]) -> None:
    seen = retried([*before, *broken], [*before, *RIGHT])
    assert seen.emitted == [*before, *RIGHT]
    assert seen.finish is Finish.STOP
    assert seen.notes["call_retry"] == 1
    assert seen.attempts == 2


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([10, 46, *RIGHT], id="one"),
        pytest.param([OPEN, GOOD, CLOSE, *RIGHT], id="two"),
        pytest.param([OPEN, OTHER, CLOSE, EOS], id="undeclared"),
        pytest.param([OPEN, GOOD, EOS], id="without the closing tag"),
        pytest.param([THINK, OPEN, 10, END_THINK, 10, EOS], id="in a thought"),
        pytest.param([10, CLOSE, EOS], id="a closing tag alone"),
    ],
)
def test_B2_calls_that_can_be_parsed_are_kept(script: list[int]) -> None:
    seen = retried(script, [99])
    assert seen.emitted == script
    assert (seen.attempts, seen.notes) == (1, {})


def test_B3_a_call_is_held_until_it_is_complete() -> None:
    device = {"vocabulary": CALLS, "odds": lambda ids, _: -20.0, "accepts": (0,)}
    seen = run([10, OPEN, GOOD, CLOSE, 10, EOS], RETRY, **device)
    assert [effects.emit for effects in seen.effects] == [
        (10,), (), (), (OPEN, GOOD, CLOSE), (10,), (EOS,),
    ]  # fmt: skip


def test_B4_a_long_call_is_emitted_as_it_is_decoded() -> None:
    script = [OPEN, *[10] * LONGEST, BAD, EOS]
    seen = retried(script, [99], max_tokens=2 * LONGEST)
    assert seen.emitted == script
    assert seen.attempts == 1


def test_B5_a_call_is_retried_at_most_once() -> None:
    again = [OPEN, BAD, EOS]
    seen = retried([OPEN, BAD, CLOSE, EOS], again)
    assert seen.emitted == again
    assert seen.attempts == 2


def test_B6_an_output_that_reaches_its_length_limit_keeps_an_incomplete_call() -> None:
    script = [10, OPEN, BAD, 10]
    seen = retried([*script, 10, 10], [99], max_tokens=4)
    assert (seen.emitted, seen.finish) == (script, Finish.LENGTH)


def test_B7_no_call_is_retried_without_tools_or_with_the_rule_off() -> None:
    script = [OPEN, BAD, CLOSE, EOS]
    none = dataclasses.replace(CALLS, calls=())
    for vocabulary, settings in (
        (none, RETRY),
        (dataclasses.replace(CALLS, marker=-1), RETRY),
        (CALLS, dataclasses.replace(RETRY, call_retry=False)),
        (CALLS, dataclasses.replace(RETRY, floor=0)),
    ):
        assert retried(script, [99], vocabulary=vocabulary, settings=settings).emitted == script


def test_B8_without_a_grammar_the_call_is_emitted_as_it_is() -> None:
    policy = Policy(max_tokens=99, stop_ids=frozenset({EOS}), recovery=RETRY, vocabulary=CALLS)
    state, _ = advance(State(), Prefilled(10), policy)
    state, effects = advance(state, Stepped((OPEN, BAD, EOS)), policy)
    assert (effects.emit, effects.restart, effects.finish) == ((), Restart.CALL, None)
    _, effects = advance(state, Cancelled(Finish.STOP), policy)
    assert (effects.emit, effects.finish) == ((OPEN, BAD, EOS), Finish.STOP)
    again, effects = advance(state, CallRetried(), policy)
    assert (again.ids, effects.retract, effects.notes) == ((10,), 3, ("call_retry",))


def test_B10_a_cancelled_output_ends_before_a_held_call() -> None:
    """A cancelled output is a prefix of the whole one, from which the call may be dropped."""
    policy = Policy(max_tokens=99, stop_ids=frozenset({EOS}), recovery=RETRY, vocabulary=CALLS)
    state, _ = advance(State(), Prefilled(10), policy)
    for tokens in (
        (OPEN, BAD),
        (OPEN, BAD, EOS),
    ):  # incomplete; while a grammar is compiled
        held, _ = advance(state, Stepped(tokens), policy)
        done, effects = advance(held, Cancelled(), policy)
        assert (effects.emit, effects.finish) == ((), Finish.CANCELLED)
        assert (done.ids, effects.retract) == ((10,), len(tokens))
        _, effects = advance(held, Cancelled(Finish.LENGTH), policy)
        assert effects.emit == tokens


def test_B9_a_forced_call_that_cannot_be_parsed_is_decoded_again() -> None:
    lead = [52, 46, 80, OPEN, 900]
    script = [52, 46, EOS, OPEN, 10, 10, CLOSE, EOS]
    device: dict[str, Any] = {"odds": lambda ids, _: 0.0}
    seen = retried(script, [*lead[:3], *RIGHT], **device)
    assert seen.emitted == [52, 46, 80, *RIGHT]
    assert seen.notes == {"tool_prefix": 1, "call_retry": 1}


READ = Tool("read_file", {"properties": {"path": {}}, "required": ["path"]})


@pytest.mark.parametrize(
    ("arguments", "broken"),
    [
        ('{"path": "a.py"}', False),
        ('{"path": "a.py", "more": [1]}', False),
        ('"{\\"path\\": \\"a.py\\"}"', False),
        ('{"path": }', True),
        ('{"path": a.py}', True),
        ("{'path': 'a.py'}", True),
        ('{"path": "a.py",}', True),
        ('"a.py"', True),
        ('["a.py"]', True),
        ("{}", True),
        ('{"file": "a.py"}', True),
    ],
)
def test_B11_arguments_are_an_object_with_the_required_keys(arguments: str, broken: bool) -> None:
    call = f'<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'
    vocabulary = dataclasses.replace(CALLS, tools=(READ,))
    assert is_broken_call(call, vocabulary) is broken
    xml = "<tool_call>\n<function=read_file>\n</function>\n</tool_call>"
    assert is_broken_call(xml, dataclasses.replace(vocabulary, syntax=SYNTAXES["qwen_xml"]))


PIECE, END_OF_MARKER, END_PIECE, END_OF_CLOSER, JOINED = 71, 72, 73, 74, 75
PIECES = MEANING | {
    PIECE: "<tool",
    END_OF_MARKER: "_call>",
    END_PIECE: "</tool",
    END_OF_CLOSER: "_call>\n",
    JOINED: "_call>{",
}


@pytest.mark.parametrize(
    ("broken", "right"),
    [
        pytest.param([BAD, END_PIECE, END_OF_CLOSER, EOS], [GOOD, END_PIECE, END_OF_CLOSER, EOS]),
        pytest.param([BAD, EOS], [GOOD, EOS]),
        pytest.param([EOS], [GOOD, END_PIECE, END_OF_CLOSER, EOS]),
    ],
)
@pytest.mark.parametrize("before", [[], [10, 46], [PIECE, END_OF_MARKER, GOOD, END_PIECE, 74, 10]])
def test_B12_markers_of_several_tokens_are_read_as_text(
    before: list[int], broken: list[int], right: list[int]
) -> None:
    """Such a call is decoded again from the token after its opening marker, which was emitted."""
    vocabulary = dataclasses.replace(
        CALLS,
        text=lambda ids: "".join(PIECES.get(i, "w") for i in ids),
        marker=-1,
        closer=-1,
        call_begins=frozenset({END_OF_MARKER, JOINED}),
        call_ends=frozenset({END_OF_CLOSER}),
    )
    for marker in ([PIECE, END_OF_MARKER], [PIECE, JOINED]):
        kept = [*before, *marker]
        seen = retried([*kept, *broken], [*kept, *right], vocabulary=vocabulary)
        assert seen.emitted == [*kept, *right]
        assert (seen.notes["call_retry"], seen.attempts) == (1, 2)
    whole = [*before, PIECE, END_OF_MARKER, GOOD, END_PIECE, END_OF_CLOSER, EOS]
    assert retried(whole, [99], vocabulary=vocabulary).emitted == whole
    mention = [10, PIECE, 10, END_OF_MARKER, BAD, EOS]
    assert retried(mention, [99], vocabulary=vocabulary).emitted == mention
