"""What a reader of outputs returns is that of a fresh one, whatever it has read before."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpora import SICK, healthy, long_data, sick
from fake_device import TEXTS, VOCABULARY

import dflash_jax
from dflash_jax.engine.state_machine.announcements import introduces_call
from dflash_jax.engine.state_machine.output_reader import CompleteCall, EndedOutput, OutputReader
from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.calls import Content, calls_of
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool

HERE = Path(__file__).parent
TOOLS = (Tool("read", {"properties": {"path": {}}, "required": ["path"]}), Tool("stop", {}))
OBJECT = '{"name": "read", "arguments": {"path": "x"}}'
SAID = (
    "",
    "Let me look:\nCALL\nCALL\n\nIt is \N{GRINNING FACE} é.",
    "<think>\nhm CALL or\n</think>\n\nCALL",
    "hm</think>So.\nCALL <think>again",
    "CALL<tool_call>\n{bad}\n</tool_call>\nCALL",
    "<tool_call>\n</tool_call>CALL</tool_call> and ``",
    f"I do it:\n```json\n{OBJECT}\n```\n```json\n{OBJECT}\n```",
    f"An example:\n```json\n{OBJECT}\n```\nCALL",
    f"```xml\n<tool_call>\n{OBJECT}\n</tool_call>\n```\nSo it is.",
    '{"path": "x"}',
    "call:read{path:x} <function=read>\n<parameter=path>\nx\n</parameter>\n</function> `<read>`",
    "<|im_start|>\N{ZERO WIDTH SPACE}",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(Path(dflash_jax.__file__).parent / "data/tiny/target")
    assert found is not None
    return found


def vocabulary_of_family(tokenizer: Tokenizer, family: str) -> OutputVocabulary:
    return OutputVocabulary(
        text=tokenizer.raw,
        syntax=SYNTAXES[family],
        tools=TOOLS,
        fenced=introduces_call,
        inside_thought=family == "gemma4",
    )


def canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except ValueError:
        return arguments


Facts = tuple[str, bool, tuple[CompleteCall, ...], EndedOutput]


def fresh(ids: Ids, vocabulary: OutputVocabulary) -> Facts:
    """Return what one parser, which is given the whole text, says of an output."""
    text = vocabulary.text(ids)
    parser = OutputParser(vocabulary.syntax, vocabulary.tools, thinking=vocabulary.inside_thought)
    found = calls_of(parser.push(text.rstrip("\N{REPLACEMENT CHARACTER}")))
    calls = tuple(
        CompleteCall(name, canonical(arguments)) for name, arguments, is_whole in found if is_whole
    )
    parser = OutputParser(
        vocabulary.syntax,
        vocabulary.tools,
        thinking=vocabulary.inside_thought,
        fenced=vocabulary.fenced,
    )
    events = [*parser.push(text), *parser.finish()]
    content = "".join(event.text for event in events if isinstance(event, Content))
    answered = bool(content.strip(" \t\n\N{ZERO WIDTH SPACE}")) and vocabulary.is_visible(ids)
    thought = vocabulary.syntax.thought if vocabulary.syntax else None
    thinking = thought is not None and thought.is_open(text, inside=vocabulary.inside_thought)
    called = parser.calls > 0
    ended = EndedOutput(called, called or parser.unfinished, answered)
    return text, thinking, calls, ended


def check(ids: Ids, vocabulary: OutputVocabulary, rng: random.Random, step: int = 1) -> None:
    """Read prefixes of an output forwards, and then back and forth, with ends in between."""
    places = [*range(0, len(ids), step), len(ids)]
    wanted = {place: fresh(ids[:place], vocabulary) for place in places}
    forwards = OutputReader(vocabulary)
    for place in places:
        text, thinking, calls, ended = wanted[place]
        assert forwards.text(ids[:place]) == text, place
        assert forwards.thinking(ids[:place]) == thinking, place
        assert forwards.calls(ids[:place]) == calls, place
    reader = OutputReader(vocabulary)
    for place in (*reversed(places), *(rng.choice(places) for _ in range(2 * len(places)))):
        text, thinking, calls, ended = wanted[place]
        match rng.randrange(4):
            case 0:
                assert reader.text(ids[:place]) == text
            case 1:
                assert reader.thinking(ids[:place]) == thinking
            case 2:
                assert reader.calls(ids[:place]) == calls
            case 3:
                assert reader.ended(ids[:place]) == ended


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_facts_of_every_prefix_and_retraction_are_those_of_a_fresh_parse(
    tokenizer: Tokenizer, family: str
) -> None:
    vocabulary = vocabulary_of_family(tokenizer, family)
    call = SYNTAXES[family].render("read", {"path": "a </tool_call> }"})
    rng = random.Random(family)
    for said in SAID:
        ids = tuple(tokenizer.encode(said.replace("CALL", call), specials=False))
        check(ids, vocabulary, rng)
        broken = tuple(i for i in ids if rng.random() < 0.9)  # with parts of characters
        check(broken, vocabulary, rng, step=5)


def recorded(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the outputs that other tests of the rules read."""
    for name in ("answers.txt", "stalls.txt"):
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            yield tokenizer.encode(line, specials=False)
    for _, text in (*healthy(), *long_data()):
        yield tokenizer.encode(text, specials=False)
    for _, beginning, unit in SICK:
        yield sick(beginning, unit, tokenizer.encode, 300)


def test_facts_of_recorded_outputs_are_those_of_a_fresh_parse(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of_family(tokenizer, "hermes")
    rng = random.Random(1)
    for ids in list(recorded(tokenizer))[::3]:
        check(tuple(ids), vocabulary, rng, step=max(len(ids) // 2, 1))


def test_facts_of_texts_that_depend_on_all_ids() -> None:
    """Decoders may change earlier text, and a test's text may be any function of the ids."""
    rng = random.Random(2)
    run = dataclasses.replace(VOCABULARY, text=lambda ids: bytes(ids).decode(errors="replace"))
    strict = dataclasses.replace(VOCABULARY, text=lambda ids: _all_or_nothing(ids))
    letters = list("aé漢\N{GRINNING FACE}".encode())
    for _ in range(10):
        ids = tuple(rng.choice([*letters, 0xFF]) for _ in range(24))
        check(ids, run, rng)
        check(ids, strict, rng)
    tokens = tuple(rng.choice(list(TEXTS)) for _ in range(200))
    check(tokens, VOCABULARY, rng)


def _all_or_nothing(ids: Ids) -> str:
    """Decode bytes as the vocabularies do that have a token for each: as a run, or not at all."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(ids)


def test_ids_that_extend_the_last_ones_are_decoded_and_parsed_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    push = OutputParser.push

    def counted(self: OutputParser, text: str) -> list:
        parsed.append(len(text))
        return push(self, text)

    monkeypatch.setattr(OutputParser, "push", counted)
    text = "".join(f"Line {i}.\n{SYNTAXES['hermes'].render('stop', {})}\n" for i in range(40))
    ids = tuple(tokenizer.encode(text, specials=False))
    decoded: list[int] = []

    def raw(some: Ids) -> str:
        decoded.append(len(some))
        return tokenizer.raw(some)

    vocabulary = dataclasses.replace(vocabulary_of_family(tokenizer, "hermes"), text=raw)
    reader = OutputReader(vocabulary)
    for place in range(0, len(ids), 8):
        reader.calls(ids[:place])
    reader.ended(ids)
    assert sum(parsed) == len(text)
    assert sum(decoded) < 4 * len(ids)
