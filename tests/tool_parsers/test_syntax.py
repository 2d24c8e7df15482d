"""Each family's syntax: forced calls, and the state of an output."""

from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, CallState, Syntax, syntax_of

ARGUMENTS = {"city": "Bonn", "days": 3, "units": ["C", "F"], "exact": True, "more": {"k": None}}
RENDERED = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 3, "units":'
    ' ["C", "F"], "exact": true, "more": {"k": null}}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    '<parameter=days>\n3\n</parameter>\n<parameter=units>\n["C", "F"]\n</parameter>\n'
    "<parameter=exact>\ntrue\n</parameter>\n"
    '<parameter=more>\n{"k": null}\n</parameter>\n</function>\n</tool_call>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:3,units:[<|"|>C<|"|>,<|"|>F'
    '<|"|>],exact:true,more:{k:null}}<tool_call|>',
    "llama": '{"name": "weather", "parameters": {"city": "Bonn", "days": 3, "units":'
    ' ["C", "F"], "exact": true, "more": {"k": null}}}',
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Bonn", "days": 3, "units": ["C", "F"], "exact": true, "more":'
    ' {"k": null}}<|call|>',
}
FAMILIES = pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)


@FAMILIES
def test_calls_are_written_as_the_chat_templates_write_them(syntax: Syntax) -> None:
    assert syntax.render("weather", ARGUMENTS) == RENDERED[syntax.name]


@FAMILIES
@pytest.mark.parametrize("parameter", ["city", None])
def test_a_begun_call_is_the_beginning_of_the_rendered_one(
    syntax: Syntax, parameter: str | None
) -> None:
    begun = syntax.begin("weather", parameter)
    bare = begun.removeprefix("<|end|>").removeprefix("\n")
    assert bare in syntax.render("weather", ARGUMENTS)
    assert not begun.endswith(" ")


@FAMILIES
def test_an_output_knows_where_its_calls_stand(syntax: Syntax) -> None:
    whole = "Let me check:\n" + syntax.render("weather", ARGUMENTS)
    assert syntax.call_state("Let me check:") is CallState.NONE
    assert syntax.call_state("Let me check:" + syntax.begin("weather", "city")) is CallState.OPEN
    assert syntax.call_state(whole[: whole.rindex(syntax.closes[0])]) is CallState.OPEN
    assert syntax.call_state(whole) is CallState.COMPLETE


def test_a_bare_function_is_complete_without_its_wrapper() -> None:
    text = "\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>"
    assert SYNTAXES["qwen_xml"].call_state(text) is CallState.COMPLETE


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "harmony"])
def test_thoughts_open_and_close(name: str) -> None:
    thought = SYNTAXES[name].thought
    assert thought
    assert thought.is_open("", inside=True)
    assert not thought.is_open("")
    assert thought.is_open(thought.opening + "hm")
    assert not thought.is_open(thought.opening + "hm" + thought.forced)
    assert not thought.is_open("hm" + thought.forced, inside=True)


def test_templates_tell_their_syntax() -> None:
    assert syntax_of(None) is None
    assert syntax_of("{{ messages }}") is None
    assert syntax_of("... <tool_call>\n<function=example>") is SYNTAXES["qwen_xml"]
    assert syntax_of("<|tool_call>call:") is SYNTAXES["gemma4"]
    assert syntax_of("<|channel|>commentary json<|message|>") is SYNTAXES["harmony"]
    assert syntax_of("<|channel>thought <|tool_call>call:") is SYNTAXES["gemma4"]
    assert syntax_of("<|start_header_id|>") is SYNTAXES["llama"]


def test_the_shipped_pair_speaks_hermes() -> None:
    """The template renders a call as `Syntax.render`, which starts with the forced text."""
    tokenizer = Tokenizer.from_directory(Path(dj.__file__).parent / "data" / "tiny" / "target")
    assert tokenizer
    assert syntax_of(tokenizer.template) is SYNTAXES["hermes"]
    call = {"function": {"name": "read_file", "arguments": {"path": "a.txt"}}}
    messages = [
        {"role": "user", "content": "Read a.txt."},
        {"role": "assistant", "content": "Let me check:", "tool_calls": [call]},
    ]
    ids = tokenizer.chat(messages, add_generation_prompt=False)
    text = tokenizer.core.decode(ids, skip_special_tokens=False)
    whole = SYNTAXES["hermes"].render("read_file", {"path": "a.txt"})
    assert "Let me check:\n" + whole in text
    begun = SYNTAXES["hermes"].begin("read_file", "path")
    beginning = tokenizer.encode("Let me check:" + begun, specials=False)
    assert (
        beginning == tokenizer.encode("Let me check:\n" + whole, specials=False)[: len(beginning)]
    )
