"""Parameters whose schema is behind references and combined schemas: types, rules and grammars."""

import functools
import itertools
import json
from typing import Any

import pytest

from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.calls import ToolCallDelta
from dflash_jax.tool_parsers.grammar import call_grammar
from dflash_jax.tool_parsers.malformed_calls import are_valid_arguments
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice, typed_value

NAMES = sorted(SYNTAXES)
SPECIALS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
GET = {
    "type": "object",
    "properties": {"op": {"const": "get"}, "id": {"type": "integer"}},
    "required": ["op", "id"],
    "additionalProperties": False,
}
PUT = {
    "type": "object",
    "properties": {"op": {"const": "put"}, "value": {"type": "boolean"}},
    "required": ["op", "value"],
    "additionalProperties": False,
}
CLOSED = {"additionalProperties": False}
INTEGER = {"type": "integer"}
# A schema, arguments that fit it, and arguments that do not.
SCHEMAS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "oneOf": (
        {"type": "object", "oneOf": [GET, PUT]},
        [{"op": "get", "id": 7}, {"op": "put", "value": True}],
        [{"op": "put", "id": 7}, {"op": "get"}, {}],
    ),
    "anyOf without a type": (
        {"anyOf": [{"$ref": "#/$defs/G"}, {"$ref": "#/$defs/P"}], "$defs": {"G": GET, "P": PUT}},
        [{"op": "get", "id": 7}, {"op": "put", "value": False}],
        [{"op": "put"}, {}],
    ),
    "$ref": (
        {"$ref": "#/$defs/A", "$defs": {"A": PUT}},
        [{"op": "put", "value": True}],
        [{"op": "put", "value": "true"}, {}],
    ),
    "$ref twice": (
        {"$ref": "#/definitions/A", "definitions": {"A": {"$ref": "#/definitions/B"}, "B": PUT}},
        [{"op": "put", "value": True}],
        [{}],
    ),
    "allOf": (
        {
            "type": "object",
            "allOf": [
                {"properties": {"n": INTEGER}, "required": ["n"]},
                {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ],
        },
        [{"n": 1, "b": True}],
        [{"n": 1}, {"n": "x", "b": True}],
    ),
    "one of two required": (
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            **CLOSED,
        },
        [{"a": 1}, {"b": 2}],
        [{}],
    ),
    "beside properties": (
        {
            "type": "object",
            "properties": {"n": INTEGER},
            "required": ["n"],
            "anyOf": [{"properties": {"op": {"enum": ["a", "b"]}}, "required": ["op"]}],
        },
        [{"n": 1, "op": "b"}],
        [{"n": 1, "op": "c"}, {"n": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "additionalProperties": INTEGER},
        [{}, {"n": 3}, {"some-name": 3, "x.y": 4}],
        [{"n": "x"}],
    ),
    "additionalProperties beside others": (
        {
            "type": "object",
            "properties": {"city": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": INTEGER,
        },
        [{"city": True}, {"city": True, "cities": 3}, {"city": False, "cit": 3}],
        [{"city": 3}, {"city": True, "n": "x"}, {"n": 1}],
    ),
    "required from additionalProperties": (
        {"type": "object", "required": ["n"], "additionalProperties": INTEGER},
        [{"n": 3}],
        [{}, {"n": "x"}],
    ),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^n_": INTEGER, "^b_": {"type": "boolean"}},
            **CLOSED,
        },
        [{"n_a": 3}, {"b_flag": True}],
        [{"a": 3}, {"n_a": True}, {"b_flag": 3}],
    ),
    "a constant without a type": (
        {"type": "object", "properties": {"n": {"const": 5}}, "required": ["n"]},
        [{"n": 5}],
        [{"n": 6}, {"n": "5"}],
    ),
    "constants in alternatives": (
        {
            "type": "object",
            "properties": {"n": {"anyOf": [{"const": 5}, {"const": True}, {"type": "null"}]}},
            "required": ["n"],
        },
        [{"n": 5}, {"n": True}, {"n": None}],
        [{"n": 6}],
    ),
    "an enum behind a reference": (
        {
            "type": "object",
            "properties": {"c": {"allOf": [{"$ref": "#/$defs/C"}], "description": "colour"}},
            "required": ["c"],
            "$defs": {"C": {"type": "string", "enum": ["red", "blue"]}},
        },
        [{"c": "red"}],
        [{"c": "green"}],
    ),
}
CASES = [pytest.param(*case, id=name) for name, case in SCHEMAS.items()]


@functools.cache
def grammars() -> Grammars:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    return Grammars(tokenizer, 2048, [2040])


def matches(grammar: str, text: str) -> bool:
    """Return whether a grammar matches the whole text."""
    state = grammars().make({"grammar": grammar})
    tokenizer = grammars()._tokenizer
    assert tokenizer is not None
    state.accept(tokenizer.encode(text, specials=False))
    if state.error is None and not state.finished:
        state.accept([2040])
    return state.error is None


def said(family: str, arguments: dict[str, Any]) -> str:
    text = SYNTAXES[family].render("act", arguments)
    ends = ("<|start|>assistant", "<|call|>") if family == "harmony" else ("", "")
    return text.removeprefix(ends[0]).removesuffix(ends[1])


@pytest.mark.parametrize(("schema", "fitting", "others"), CASES)
def test_arguments_are_read_and_validated_by_the_merged_schema(
    schema: dict[str, Any], fitting: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    tool = Tool("act", schema)
    for family in NAMES:
        for arguments in fitting:
            events = OutputParser(SYNTAXES[family], [tool]).push(
                said(family, arguments) + "<|end|>"
            )
            text = "".join(x.text for x in events if isinstance(x, ToolCallDelta))
            assert json.loads(text) == arguments, family
    assert all(are_valid_arguments(tool, json.dumps(arguments)) for arguments in fitting)
    if {} in others:
        assert not are_valid_arguments(tool, "{}")


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("schema", "fitting", "others"), CASES)
def test_a_required_call_follows_the_merged_schema(
    family: str,
    schema: dict[str, Any],
    fitting: list[dict[str, Any]],
    others: list[dict[str, Any]],
) -> None:
    tool, choice = Tool("act", schema), ToolChoice("required")
    grammar = call_grammar(SYNTAXES[family], [tool], choice, SPECIALS)
    for arguments in fitting:  # the compiler of JSON schemas has an order of its own
        orders = [dict(items) for items in itertools.permutations(arguments.items())]
        assert any(matches(grammar, said(family, order)) for order in orders), arguments
    for arguments in others:
        if family == "qwen_xml":  # a text looks like a value of another type
            arguments = {k: x for k, x in arguments.items() if x not in ("true", "5")}
        assert not matches(grammar, said(family, arguments)), arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "None", "None"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "3", 3),
        ({"enum": ["null", "a"]}, "null", "null"),
        ({"enum": ["a", 1, None]}, "1", 1),
        ({"const": {"a": 1}}, '{"a": 1}', {"a": 1}),
        ({"const": False}, "False", False),
        ({"type": "integer", "enum": ["1", "2"]}, "1", 1),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, "3", 3),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"items": {}}, "[1]", [1]),
        ({"minimum": 3}, "4", 4),
        ({"oneOf": [{"$ref": "#/properties/x"}]}, "4", "4"),
        ({"type": "string"}, "4", "4"),
    ],
)
def test_a_text_becomes_a_value_of_the_merged_type(schema: Any, text: str, value: object) -> None:
    tool = Tool("f", {"properties": {"x": schema}, "$defs": {"n": {"type": "integer"}}})
    assert typed_value(text, tool, "x") == value


def test_properties_behind_a_condition_have_their_types() -> None:
    condition = {"properties": {"op": {"const": "put"}}}
    schema = {"type": "object", "properties": {"op": {"type": "string"}}, "if": condition}
    tool = Tool("f", schema | {"then": {"properties": {"n": INTEGER}, "required": ["n"]}})
    assert typed_value("3", tool, "n") == 3
    assert tool.required == []


def test_hostile_schemas_are_merged_in_bounded_time() -> None:
    names = [f"a{i}" for i in range(60)]
    doubled = {
        name: {key: [{"$ref": f"#/$defs/a{at + 1}"}] * 2 for key in ("allOf", "anyOf")}
        for at, name in enumerate(names)
    }
    wide = {"anyOf": [{"properties": {name: {}}, "required": [name]} for name in names]}
    for schema in (
        {"$ref": "#/$defs/a0", "$defs": doubled | {"a60": GET}},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}]},
        {"allOf": [wide] * 60},
        {"allOf": [{"properties": {f"p{i}_{k}": {} for k in range(200)}} for i in range(200)]},
        {"patternProperties": {"(a+)+$": INTEGER}},
        {"oneOf": 3, "allOf": {"a": 1}, "$ref": 3, "required": 3, "patternProperties": []},
    ):
        tool = Tool("f", schema)
        typed_value("1", tool, "a" * 60)
        assert tool.first_parameter is None or tool.properties
