"""The detokenizer: incremental text, and stop strings across pieces."""

import itertools
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool


def _byte_letters() -> list[str]:
    """Return the letter for each byte in byte-level BPE vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + rest.index(b)) for b in range(256)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Token i is byte i."""
    core = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(_byte_letters())}, merges=[])
    )
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, None, {})


def chunks(data: bytes, cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [list(data[a:b]) for a, b in itertools.pairwise(borders)]


texts = st.text(st.sampled_from("ab¶é漢🙂 \n"), max_size=12)
cuts = st.lists(st.integers(0, 60), max_size=8)


@settings(max_examples=100, deadline=None)
@given(text=texts, where=cuts)
def test_pieces_are_whole_characters_and_join_to_the_text(
    tokenizer: Tokenizer, text: str, where: list[int]
) -> None:
    stream = tokenizer.stream()
    emitted = ""
    for ids in chunks(text.encode(), where):
        emitted += stream.push(ids)
        assert text.startswith(emitted)  # never a replacement character or part of one
    assert emitted + stream.flush() == text == stream.text


def test_an_incomplete_character_is_held_until_the_end(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert stream.push("a🙂".encode()[:-1]) == "a"
    assert stream.flush().strip("\ufffd") == ""


@settings(max_examples=200, deadline=None)
@given(text=texts, where=cuts, stop=st.lists(st.text("ab¶é", min_size=1, max_size=3), max_size=3))
def test_output_is_cut_before_the_first_stop_string_and_never_retracted(
    tokenizer: Tokenizer, text: str, where: list[int], stop: list[str]
) -> None:
    output = Detokenizer(tokenizer, stop)
    pieces = []
    for ids in chunks(text.encode(), where):
        pieces.append(output.push(ids))
        emitted = "".join(pieces)
        assert output.text == emitted
        assert text.startswith(emitted)
        assert not any(s in emitted for s in stop)
    pieces.append(output.finish())
    places = [text.find(s) for s in stop if s in text]
    assert "".join(pieces) == output.text
    assert output.stopped == bool(places)
    if not places:
        assert output.text == text
    elif len(stop) == 1:
        assert output.text == text[: places[0]]
    else:  # of overlapping stop strings, the one completed first counts
        assert output.text in {text[:at] for at in places}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_over_chunk_borders(tokenizer: Tokenizer, size: int) -> None:
    output, data = Detokenizer(tokenizer, ["</end>"]), b"say </en or </end> and more"
    decoded = [output.push(list(data[i : i + size])) for i in range(0, len(data), size)]
    assert "".join(decoded) == "say </en or "
    assert output.stopped
    assert output.push([65]) == output.finish() == ""


def test_a_partial_stop_string_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    output = Detokenizer(tokenizer, ["</end>"])
    assert output.push(list(b"so </en")) == "so "
    assert output.finish() == "</en"
    assert not output.stopped


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = Detokenizer(None, ["x"])
    assert output.push([1, 2]) == output.finish() == output.text == ""
    assert not output.stopped


@pytest.mark.parametrize("width", [1, 4, 1000])
def test_stop_strings_do_not_act_in_calls_of_declared_tools(width: int) -> None:
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    call = SYNTAXES["hermes"].render("read", {"path": "a STOP"})
    raw = f"<think>\nhm\n</think>\n\nLook:{call}\nDone STOP or not"
    ids = tokenizer.encode(raw, specials=False)

    def decoded(stop: str, tools: list[Tool]) -> tuple[str, bool]:
        output = Detokenizer(tokenizer, [stop], tools)
        pieces = [output.push(ids[i : i + width]) for i in range(0, len(ids), width)]
        pieces.append(output.finish())
        assert "".join(pieces) == output.text
        return output.text, output.stopped

    text, tools = tokenizer.decode(ids), [Tool("read", {})]
    assert decoded("STOP", []) == (text[: text.index("STOP")], True)
    assert decoded("STOP", tools) == (text[: text.rindex("STOP")], True)
    for stop in ("path", "t or n", ":\n{", "}\n\nDone"):
        assert decoded(stop, tools) == (text, False)
    assert decoded("</think>", tools) == ("\nhm\n", True)
    ids = tokenizer.encode(f"So call:{call}", specials=False)
    assert decoded("all:", tools) == (
        "So c",
        True,
    )  # no call after all


@pytest.mark.parametrize("width", [1, 4, 1000])
@pytest.mark.parametrize(
    ("call", "stopped"),
    [
        ('<tool_call>\n{"name": STOP}\n</tool_call>', True),  # not a call, so it is text
        ('<tool_call>\n{"name": "other STOP", "arguments": {}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "read", "arguments": {"path": "STOP"}, no}\n</tool_call>', False),
        ('<tool_call>\n{"name": "other", "arguments": {"path": "STOP"}}\n</tool_call>', False),
    ],
)
def test_detokenizer_and_parser_agree_on_stop_strings_in_malformed_calls(
    call: str, stopped: bool, width: int
) -> None:
    """Text already emitted as part of a call is not searched, since it cannot be retracted."""
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    tools = [Tool("read", {})]
    ids = tokenizer.encode(f"Look: {call} Done.", specials=False)
    output = Detokenizer(tokenizer, ["STOP"], tools)
    pieces = [output.push(ids[i : i + width]) for i in range(0, len(ids), width)]
    assert "".join([*pieces, output.finish()]) == output.text
    assert output.stopped == stopped
    text = tokenizer.decode(ids)
    assert output.text == (text[: text.index("STOP")] if stopped else text)
    parser = OutputParser(SYNTAXES["hermes"], tools, stop=["STOP"])
    raw = tokenizer.raw(ids)
    for i in range(0, len(raw), width):
        parser.push(raw[i : i + width])
    parser.finish()
    assert parser.stopped_by == ("STOP" if stopped else None)


def test_a_long_text_that_may_be_a_call_is_held_in_linear_time() -> None:
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    read = Tool("read", {"properties": {"path": {"type": "string"}}})
    call = '{"path": "x"}\n'
    output = Detokenizer(tokenizer, ["STOP"], [read])
    assert output.push(tokenizer.encode(call, specials=False)) + output.finish() == call
    text = '{"path": "' + "ab " * 10_000 + "STOP"
    output, ids = Detokenizer(tokenizer, ["STOP"], [read]), tokenizer.encode(text, specials=False)
    began = time.process_time()
    shown = [output.push([token]) for token in ids]
    assert time.process_time() - began < 5
    assert shown == [""] * len(ids)
    assert output.finish() == text.removesuffix("STOP")
    assert output.stopped_by == "STOP"
