"""Grammars of required calls: calls match, prose and undeclared tools do not."""

import json
import re

import pytest
import tokenizers

from dflash_jax.engine.structured.grammars import Grammar, Grammars
from dflash_jax.errors import RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.calls import ToolCallDelta
from dflash_jax.tool_parsers.grammar import answer_grammar, call_grammar
from dflash_jax.tool_parsers.lark_reader import lark_tokens
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice

llguidance = pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [Tool("read", SCHEMA), Tool("stop", {})]
NAMES = sorted(SYNTAXES)
SPECIALS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(locate("tiny", "target"))
    assert found is not None
    return found


def matches(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Return whether the grammar matches the whole text."""
    known = llguidance.LLTokenizer(tokenizer.core.to_str(), eos_token=[2040])
    source = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(known, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, specials=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("family", NAMES)
def test_a_demanded_call_is_all_that_may_be_said(tokenizer: Tokenizer, family: str) -> None:
    syntax = SYNTAXES[family]
    any_call = call_grammar(syntax, TOOLS, ToolChoice("required"), SPECIALS)
    read = syntax.render("read", {"path": "a b"})
    stop = syntax.render("stop", {})
    if family == "harmony":
        read, stop = (
            t.removeprefix("<|start|>assistant").removesuffix("<|call|>") for t in (read, stop)
        )
    assert matches(tokenizer, any_call, read)
    assert matches(tokenizer, any_call, stop)
    assert not matches(tokenizer, any_call, "Let me see.")
    assert not matches(tokenizer, any_call, read.replace("read", "rm"))
    named = call_grammar(syntax, TOOLS, ToolChoice("named", "stop"), SPECIALS)
    assert matches(tokenizer, named, stop)
    assert not matches(tokenizer, named, read)


def test_thoughts_may_come_before_and_several_calls_behind(tokenizer: Tokenizer) -> None:
    syntax = SYNTAXES["hermes"]
    call = syntax.render("read", {"path": "x"})
    free = call_grammar(syntax, TOOLS, ToolChoice("required"), SPECIALS)
    assert matches(tokenizer, free, f"<think>\nHm.\n</think>\n\n{call}\n{call}")
    inside = call_grammar(syntax, TOOLS, ToolChoice("required"), SPECIALS, thinking=True)
    assert matches(tokenizer, inside, f"\nHm.\n</think>\n\n{call}")
    assert not matches(tokenizer, inside, call)
    silent = call_grammar(syntax, TOOLS, ToolChoice("required"), SPECIALS, thoughts=False)
    assert matches(tokenizer, silent, call)
    assert not matches(tokenizer, silent, f"<think>\nHm.\n</think>\n\n{call}")
    single = call_grammar(syntax, TOOLS, ToolChoice("required"), SPECIALS, parallel=False)
    assert not matches(tokenizer, single, f"{call}\n{call}")


@pytest.mark.parametrize("family", ["hermes", "qwen_xml"])
def test_schemas_of_arguments_may_say_more_than_a_grammar_can(
    tokenizer: Tokenizer, family: str
) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    schema = {"type": "object", "properties": {"tags": tags, "more": record}}
    grammar = call_grammar(SYNTAXES[family], [Tool("f", schema)], ToolChoice("required"), SPECIALS)
    call = SYNTAXES[family].render("f", {"tags": ["a"], "more": {"b": 1}})
    assert matches(tokenizer, grammar, call)


def test_tags_that_a_tokenizer_does_not_call_special_are_tokens_too(tokenizer: Tokenizer) -> None:
    """As in Qwen3's files. With the markers spelled as text, reasoning could never end."""
    raw = json.loads(tokenizer.core.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    plain = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(raw)), None, {})
    syntax = SYNTAXES["hermes"]
    call = syntax.render("read", {"path": "x"})
    inside = call_grammar(syntax, TOOLS, ToolChoice("required"), plain.special_texts, thinking=True)
    assert matches(plain, inside, f"\nHm.\n</think>\n\n{call}")
    assert not matches(plain, inside, "\nHm.\n</think>\n\nSo.")


SECRET = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "password"},
        "kind": {"const": {"format": "byte"}},
    },
    "required": ["format", "kind"],
}


@pytest.mark.sample("structure2-a/bb")
@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ({"json": SCHEMA}, '{"path": "x"}'),
        ({"json": SECRET}, '{"format": "x", "kind": {"format": "byte"}}'),
        ({"regex": "a/b+"}, "a/bb"),
        ({"choice": ["red", "blue"]}, "blue"),
        ({"grammar": "start: A A\nA: /x/"}, "xx"),
    ],
)
def test_a_structure_may_stand_behind_a_thought_or_beside_calls(
    tokenizer: Tokenizer, structure: dict, text: str
) -> None:
    def said(whole: str, around: str) -> Grammar:
        grammar = Grammars(tokenizer, 2048, [2040]).make(structure | {"around": around})
        grammar.accept(tokenizer.encode(whole, specials=False))
        if not grammar.finished:
            grammar.accept([2040])
        return grammar

    behind = answer_grammar(SYNTAXES["hermes"], SPECIALS, thinking=True)
    first = answer_grammar(SYNTAXES["hermes"], SPECIALS)
    for whole in (text, f"<think>Hm {text}.</think>\n\n{text}", f"<think></think>{text}"):
        assert not said(whole, first).error
    assert said(f"<think>{text}", first).error
    never = answer_grammar(SYNTAXES["hermes"], SPECIALS, thoughts=False)
    assert not said(text, never).error
    assert said(f"<think></think>{text}", never).error
    assert not said(f"Hm {text} hm.\n</think>\n\n{text}", behind).error
    assert said("Hm.\n</think>\n\nSo.", behind).error
    assert said(text, behind).error
    syntax = SYNTAXES["hermes"]
    either = call_grammar(syntax, TOOLS, ToolChoice("auto"), SPECIALS, answer=True)
    for whole in (text, call := syntax.render("stop", {}), f"<think>Hm.</think>{text}"):
        assert not said(whole, either).error
    assert said("So.", either).error
    assert said(call + text, either).error


RICH = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "integer"},
        "deep": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["path", "lines"],
}


@pytest.mark.parametrize("family", NAMES)
def test_arguments_have_the_declared_types(tokenizer: Tokenizer, family: str) -> None:
    syntax = SYNTAXES[family]
    grammar = call_grammar(syntax, [Tool("read", RICH)], ToolChoice("required"), SPECIALS)
    good = {"path": "a > b\nc", "lines": 12}
    for more in ({}, {"mode": "w"}, {"deep": True, "tags": ["x", "y"]}):
        inside = [k for k in RICH["properties"] if k in good | more]
        arguments = {k: (good | more)[k] for k in inside}
        if family == "gemma4":  # required ones first
            arguments = good | {k: v for k, v in arguments.items() if k not in good}
        text = said(family, arguments)
        assert matches(tokenizer, grammar, text), text
    for wrong in ({"lines": 12}, good | {"lines": "x"}, good | {"mode": "q"}):
        assert not matches(tokenizer, grammar, said(family, wrong)), wrong


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": {"$ref": "#/$defs/Item"}}, [{"x": 1}]),
        ({"$ref": "#/$defs/Item"}, {"x": 1}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ({"type": ["string", "null"]}, "x"),
        ({"enum": [1, 2]}, 2),
    ],
)
def test_what_a_grammar_demands_is_what_the_parser_reads(
    tokenizer: Tokenizer, family: str, schema: dict, value: object
) -> None:
    item = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = Tool("read", {"$defs": {"Item": item}, "properties": {"a": schema}, "required": ["a"]})
    text = said(family, {"a": value})
    grammar = call_grammar(SYNTAXES[family], [tool], ToolChoice("required"), SPECIALS)
    assert matches(tokenizer, grammar, text)
    events = OutputParser(SYNTAXES[family], [tool], lenient=False).push(text)
    written = "".join(event.text for event in events if isinstance(event, ToolCallDelta))
    assert json.loads(written) == {"a": value}


def said(family: str, arguments: dict) -> str:
    text = SYNTAXES[family].render("read", arguments)
    ends = ("<|start|>assistant", "<|call|>") if family == "harmony" else ("", "")
    return text.removeprefix(ends[0]).removesuffix(ends[1])


def test_tags_of_several_tokens_end_reasoning_too(tokenizer: Tokenizer) -> None:
    """With a greedy pattern, reasoning could never end."""
    spelled = [text for text in SPECIALS if "think" not in text]
    grammar = answer_grammar(SYNTAXES["hermes"], spelled).replace("@answer", '"yes"')
    known = llguidance.LLTokenizer(tokenizer.core.to_str(), eos_token=[2040])
    for text, fits in (
        ("<think>Hm </b> </think>\n\nyes", True),
        ("yes", True),
        ("<think></think>yes", True),
        ("<think>Hm.</think>no", False),
        ("<think>yes", False),
    ):
        source = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(known, source, log_level=0)
        ids = [i for character in text for i in tokenizer.encode(character, specials=False)]
        walked = matcher.try_consume_tokens(ids) == len(ids)
        assert (walked and matcher.is_accepting()) == fits, text


def test_answers_of_harmony_are_in_the_final_channel(tokenizer: Tokenizer) -> None:
    harmony = SYNTAXES["harmony"]
    grammar = answer_grammar(harmony, SPECIALS).replace("@answer", '"yes"')
    final = "<|channel|>final<|message|>yes"
    assert matches(tokenizer, grammar, final)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert matches(tokenizer, grammar, thought + final)
    assert not matches(tokenizer, grammar, "yes")
    call = harmony.render("stop", {}).removeprefix("<|start|>assistant").removesuffix("<|call|>")
    either = call_grammar(harmony, TOOLS, ToolChoice("auto"), SPECIALS, answer=True)
    either = either.replace("@answer", '"yes"')
    for whole in (call, thought + call, final):
        assert matches(tokenizer, either, whole)


FREE_TEXT = {"TEXT", "BARE", "parameter", "thought"}  # reasoning and values of strings
CONTENT = {"list", "object"}  # values of any type


@pytest.mark.parametrize("family", NAMES)
def test_no_grammar_repeats_without_a_bound_outside_of_free_text(family: str) -> None:
    syntax, tools, choice = SYNTAXES[family], [*TOOLS, Tool("rich", RICH)], ToolChoice("required")
    grammars = []
    for specials in (SPECIALS, []):  # markers as tokens, and as text
        for thinking in (False, True):
            grammars.append(answer_grammar(syntax, specials, thinking=thinking))
            for parallel in (False, True):
                options = {"thinking": thinking, "parallel": parallel, "answer": thinking}
                grammars.append(call_grammar(syntax, tools, choice, specials, **options))
    for line in "\n".join(grammars).splitlines():  # each is a rule
        if line.partition(":")[0].partition("[")[0] in FREE_TEXT | CONTENT:
            continue
        for token in lark_tokens(line):
            assert token.text not in ("*", "+"), line
            if token.kind == "regex":
                assert not re.search(r"(?<!\\)[*+]|,\}", token.text), line


def test_a_blank_ends(tokenizer: Tokenizer) -> None:
    around = answer_grammar(SYNTAXES["hermes"], SPECIALS, thinking=True)
    grammar = Grammars(tokenizer, 2048, [2040]).make({"choice": ["yes"], "around": around})
    grammar.accept(tokenizer.encode("Hm.</think>", specials=False))
    newline = tokenizer.encode("\n", specials=False)
    for _ in range(2):
        grammar.accept(newline)
        assert not grammar.error
    grammar.accept(newline)
    assert grammar.error


def test_parameters_may_refer_to_each_other(tokenizer: Tokenizer) -> None:
    """A reference points into the parameters of the tool, also where each has its own schema."""
    item = {"type": "object", "properties": {"next": {"$ref": "#/properties/item"}}}
    schema = {"type": "object", "properties": {"item": item, "same": {"$ref": "#/properties/item"}}}
    tool = Tool("read", schema | {"required": ["item", "same"]})
    for family in ("hermes", "qwen_xml"):
        grammar = call_grammar(SYNTAXES[family], [tool], ToolChoice("required"), SPECIALS)
        value = {"next": {"next": {}}}
        assert matches(tokenizer, grammar, said(family, {"item": value, "same": value}))


@pytest.mark.parametrize("family", NAMES)
def test_calls_without_an_end_are_refused_by_name(family: str) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(RequestError, match=r"the tool 'f': no finite value .* #/properties/a"):
        call_grammar(SYNTAXES[family], [Tool("f", endless)], ToolChoice("required"), SPECIALS)
    optional = {"properties": {"aa": {"$ref": "#/$defs/e"}, "b": {}}, "type": "object"}
    optional["$defs"] = {"e": {"$ref": "#/$defs/e"}}
    tools = [Tool("f", optional)]
    text = call_grammar(SYNTAXES[family], tools, ToolChoice("required"), SPECIALS)
    assert "aa:" not in text
    assert "parameter=aa" not in text


@pytest.mark.parametrize("family", NAMES)
def test_numbers_of_calls_follow_their_schema(tokenizer: Tokenizer, family: str) -> None:
    properties = {
        "n": {"type": "integer", "minimum": 3, "maximum": 40},
        "x": {"enum": [1.5, None]},
        "b": {"$ref": "#/$defs/B"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tool = Tool("read", schema | {"$defs": {"B": {"type": "boolean"}}})
    grammar = call_grammar(SYNTAXES[family], [tool], ToolChoice("required"), SPECIALS)
    good = {"n": 12, "x": 1.5, "b": True}
    assert matches(tokenizer, grammar, said(family, good))
    assert matches(tokenizer, grammar, said(family, good | {"x": None}))
    for wrong in ({"n": 2}, {"n": 41}, {"x": 1.25}, {"b": 0}):
        assert not matches(tokenizer, grammar, said(family, good | wrong)), wrong
