"""A third equal tool call in a row ends the turn; different calls and other texts do not."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_device import (
    END_FUNCTION,
    EOS,
    FUNCTION,
    STALL,
    UNKNOWN,
    VOCABULARY,
    both,
    loop_of,
    recovery,
)

import dflash_jax
from dflash_jax.engine import running_request, vocabulary
from dflash_jax.engine.request import Request
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import Recovery, guards, output_reader
from dflash_jax.engine.state_machine.controller import (
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.vocabulary import vocabulary_of
from dflash_jax.errors import ConfigError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import tools_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
]
ON = recovery(repeated_calls=3)
CALL = [FUNCTION, END_FUNCTION]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = Path(dflash_jax.__file__).parent / "data/tiny/target"
    found = Tokenizer.from_directory(folder)
    assert found is not None
    return found


def vocabulary_for(
    tokenizer: Tokenizer, family: str = "hermes", **changes: Any
) -> OutputVocabulary:
    fields = {"text": tokenizer.raw, "syntax": SYNTAXES[family], "tools": tools_of(TOOLS)}
    return OutputVocabulary(**fields | changes)


def called(family: str, name: str = "read", path: str = "a.txt") -> str:
    return SYNTAXES[family].render(name, {"path": path})


def outcome(
    ids: Sequence[int],
    vocabulary: OutputVocabulary,
    sizes: Sequence[int] = (5,),
    settings: Recovery = ON,
) -> tuple[int, Finish | None, str | None, int]:
    """Return output length, finish reason, the rule that ended it, and the first call's end."""
    policy = Policy(max_tokens=10_000, recovery=settings, vocabulary=vocabulary)
    state, effects = advance(State(), Prefilled(ids[0]), policy)
    at, step = 1, 0
    while not effects.finish and at < len(ids):
        size = sizes[step % len(sizes)]
        state, effects = advance(state, Stepped(tuple(ids[at : at + size])), policy)
        at, step = at + size, step + 1
    kept = len(state.ids) - guards.repeated_calls_drop(state.ids[:], vocabulary)
    return len(state.ids), effects.finish, loop_of(effects.notes), kept


def test_a_third_equal_call_ends_the_turn() -> None:
    seen = both(CALL * 12, ON, max_tokens=100)
    assert (seen.emitted, seen.finish) == (CALL * 3, Finish.LENGTH)
    assert (seen.loop, seen.notes) == ("repeated_calls", {"repeated_calls": 1})
    assert guards.repeated_calls_drop(tuple(seen.emitted), VOCABULARY) == 4
    seen = both([9, *CALL, 9, *CALL, 9, 9, *CALL, 9, 9], ON, max_tokens=100)
    assert len(seen.emitted) == 10
    assert guards.repeated_calls_drop(tuple(seen.emitted), VOCABULARY) == 7


def test_repeated_calls_are_noted_when_the_model_ends_the_output() -> None:
    """The turn is complete, and the result must not depend on one more token."""
    seen = both([*CALL * 3, EOS], ON, max_tokens=100)
    assert (seen.emitted, seen.finish) == ([*CALL * 3, EOS], Finish.STOP)
    assert (seen.loop, seen.notes) == ("repeated_calls", {"repeated_calls": 1})


def test_two_equal_calls_do_not_end_the_output() -> None:
    other = [UNKNOWN, END_FUNCTION]
    for script in (CALL * 2, [*CALL * 2, *other] * 3, [*CALL, *other] * 6, [END_FUNCTION, 9] * 9):
        seen = both([*script, EOS], ON, max_tokens=100)
        assert (seen.emitted, seen.finish) == ([*script, EOS], Finish.STOP)
        assert not seen.notes
    assert both(CALL * 12, recovery(**STALL), max_tokens=30).loop is None


def test_the_number_is_a_setting() -> None:
    assert both(CALL * 9, recovery(repeated_calls=2), max_tokens=100).emitted == CALL * 2
    assert both(CALL * 9, recovery(repeated_calls=5), max_tokens=100).emitted == CALL * 5
    assert Recovery().repeated_calls == 3
    with pytest.raises(ConfigError, match="repeated_calls is 1; expected 0"):
        Recovery(repeated_calls=1)


def test_a_turn_ends_after_a_number_of_calls() -> None:
    script = [*CALL, UNKNOWN, END_FUNCTION] * 4
    seen = both(script, recovery(max_calls=5), max_tokens=100)
    assert (seen.emitted, seen.finish) == (script[:10], Finish.LENGTH)
    assert seen.notes == {"max_calls": 1}
    assert both(script, recovery(repeated_calls=2), max_tokens=16).emitted == script


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4", "llama"])
@pytest.mark.parametrize("between", ["\n", "", "\nI will look at it again.\n"])
def test_every_family_with_closing_markers(tokenizer: Tokenizer, family: str, between: str) -> None:
    known = vocabulary_for(tokenizer, family)
    call = called(family) + between
    ids = tokenizer.encode(("Look." + call * 12), specials=False)
    length, finish, kind, first = outcome(ids, known)
    assert (finish, kind) == (Finish.LENGTH, "repeated_calls")
    text = tokenizer.raw(ids[:length])
    assert text.count("read") == 3
    assert tokenizer.raw(ids[:first]).count("read") == 1
    different = [called(family, path=f"{i}.txt") + between for i in range(12)]
    ids = tokenizer.encode("Look." + "".join(different), specials=False)
    assert outcome(ids, known)[1:3] == (None, None)


def test_equal_means_name_and_arguments_not_their_spelling(tokenizer: Tokenizer) -> None:
    same = [
        '<tool_call>\n{"name": "read", "arguments": {"path": "a", "n": 1}}\n</tool_call>\n',
        '<tool_call>{"name":"read","arguments":{"n":1,"path":"a"}}</tool_call>\n',
        '<tool_call>\n{"name": "read", "arguments":\n {"n": 1, "path": "\\u0061"}}\n</tool_call>\n',
    ]
    ids = tokenizer.encode("".join(same) + "and so on", specials=False)
    assert outcome(ids, vocabulary_for(tokenizer))[2] == "repeated_calls"
    turns = [called("hermes", name, path) for name in ("read", "write") for path in "abc"]
    ids = tokenizer.encode("\n".join(turns * 4), specials=False)
    assert outcome(ids, vocabulary_for(tokenizer))[2] is None


def test_markers_in_thoughts_and_arguments_are_no_calls(tokenizer: Tokenizer) -> None:
    call = called("hermes")
    thought = "<think>\n" + f"I could write {call} or\n" * 6 + "</think>\n"
    ids = tokenizer.encode(thought + "Done.", specials=False)
    assert outcome(ids, vocabulary_for(tokenizer))[2] is None
    ids = tokenizer.encode(thought.removeprefix("<think>\n") + call * 2 + "\n", specials=False)
    found = outcome(ids, vocabulary_for(tokenizer, inside_thought=True))
    assert found[2] is None
    ids = tokenizer.encode(thought + call * 3 + "\n", specials=False)
    assert outcome(ids, vocabulary_for(tokenizer))[2] == "repeated_calls"
    text = json.dumps("<tool_call>{}</tool_call>\n" * 9)
    write = f'<tool_call>\n{{"name": "write", "arguments": {{"path": {text}}}}}\n</tool_call>\n'
    for count, kind in ((2, None), (3, "repeated_calls")):
        ids = tokenizer.encode(write * count + "End", specials=False)
        assert outcome(ids, vocabulary_for(tokenizer))[2] == kind


@pytest.mark.parametrize("family", ["gemma4", "llama", "qwen_xml"])
def test_calls_in_the_form_of_another_family_count(tokenizer: Tokenizer, family: str) -> None:
    ids = tokenizer.encode((called("hermes") + "\n") * 12, specials=False)
    known = vocabulary_for(tokenizer, family)
    assert outcome(ids, known)[2] == "repeated_calls"
    known = dataclasses.replace(known, call_ends=vocabulary._call_ends(tokenizer, known.syntax))
    assert outcome(ids, known)[2] == "repeated_calls"


def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the lengths of the texts parsed from now on."""
    read: list[int] = []
    parser = output_reader.OutputParser

    class Counting(parser):
        def push(self, text: str) -> list[Any]:
            read.append(len(text))
            return super().push(text)

    monkeypatch.setattr(output_reader, "OutputParser", Counting)
    return read


def test_a_call_full_of_closing_markers_is_parsed_in_linear_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = lengths_read(monkeypatch)
    text = called("llama", path="{}" * 1000)
    ids = tokenizer.encode(text, specials=False)
    policy = Policy(max_tokens=10_000, recovery=ON, vocabulary=vocabulary_for(tokenizer, "llama"))
    state, _ = advance(State(), Prefilled(ids[0]), policy)
    advance(state, Stepped(tuple(ids[1:])), policy)
    assert 0 < sum(read) <= len(text)


def test_the_cut_does_not_depend_on_the_sizes_of_steps(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    text = "Let me see." + called("qwen_xml") * 2 + called("qwen_xml", "write") * 12
    ids = tokenizer.encode(text, specials=False)
    known = vocabulary_for(tokenizer, "qwen_xml")
    found = {outcome(ids, known, [1]), outcome(ids, known, [len(ids)])}
    for _ in range(20):
        found.add(outcome(ids, known, [rng.randint(1, 16) for _ in range(rng.randint(1, 9))]))
    assert len(found) == 1


def test_call_ends_lists_the_ids_that_end_calls(tokenizer: Tokenizer) -> None:
    """The vocabulary of a request have the same outcome, and need no text at other tokens."""
    known = vocabulary_of(tokenizer, (1,), ON, TOOLS, None)
    assert known.call_ends
    assert len(known.call_ends) < 20
    ids = tokenizer.encode("See:" + (called("hermes") + "\n") * 12, specials=False)
    assert outcome(ids, known) == outcome(ids, vocabulary_for(tokenizer))
    assert vocabulary_of(tokenizer, (1,), ON, None, None).call_ends == frozenset()


def test_statistics_count_the_tokens_after_the_first_call(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Look." + (called("hermes") + "\n") * 12, specials=False)
    known = vocabulary_of(tokenizer, (1,), ON, TOOLS, None)
    request = Request(
        prompt=(1,), params=SamplingParams(max_tokens=500), recovery=ON, vocabulary=known
    )
    sequence = running_request.RunningRequest(request, tokenizer)
    sequence.start()
    sequence.take(Prefilled(ids[0]))
    for token in ids[1:]:
        if not sequence.done:
            sequence.take(Stepped((token,)))
    result = sequence.result()
    assert result.finish_reason == "length"
    assert result.token_ids == ids[: len(result.token_ids)]  # nothing is retracted
    dropped = result.stats.recovery.pop("repeated_calls_dropped_tokens")
    assert result.stats.recovery == {"repeated_calls": 1}
    kept = tokenizer.raw(result.token_ids[:-dropped])
    assert kept == "Look." + called("hermes")
