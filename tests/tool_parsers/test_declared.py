"""The calls that recovery may force, for all formats of tools and tool choices."""

from typing import Any

import pytest

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import (
    Tool,
    ToolChoice,
    choice_of,
    parse_json,
    tools_of,
    typed_value,
)

XML = SYNTAXES["qwen_xml"]


def tool(name: str, *parameters: str, required: list | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {p: {} for p in parameters}}
    if required is not None:
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def begun(tools: Any, tool_choice: Any = "auto") -> tuple[str, ...]:
    declared = tools_of(tools)
    return XML.beginnings(declared, choice_of(tool_choice, declared))


A, B, TERMINAL = tool("a"), tool("b"), tool("terminal", "command")
TERMINAL_CALL = "\n<function=terminal>\n<parameter=command>\n"
ANTHROPIC = {"name": "a", "input_schema": {"properties": {"x": {}}}}
FLAT = {"type": "function", "name": "a", "parameters": {"properties": {"x": {}}}}
A_WITH_X = "\n<function=a>\n<parameter=x>\n"
OF_A = "\n<function=a>\n"
OF_B = "\n<function=b>\n"


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        pytest.param([TERMINAL], "auto", TERMINAL_CALL, id="T1"),
        pytest.param([A, TERMINAL], "auto", TERMINAL_CALL, id="T2"),
        pytest.param([tool("a", "x"), B], "auto", (A_WITH_X, OF_B), id="T3"),
        pytest.param([tool("a", "x")], "auto", A_WITH_X, id="T4"),
        pytest.param([A, TERMINAL], named("a"), OF_A, id="T5"),
        pytest.param([A], "required", OF_A, id="T7"),
        pytest.param([A, B, TERMINAL], "required", TERMINAL_CALL, id="T8"),
        pytest.param([TERMINAL], "none", None, id="T9"),
        pytest.param(
            [tool("a", "p", "q", required=["q", "p"])],
            "required",
            "\n<function=a>\n<parameter=q>\n",
            id="T10",
        ),
        pytest.param(
            [tool("a", "b", "a", required=[])], "auto", "\n<function=a>\n<parameter=b>\n", id="T11"
        ),
        pytest.param([A], "auto", OF_A, id="T12"),
        pytest.param(
            [tool("a", required=[1, "p"])], "auto", "\n<function=a>\n<parameter=p>\n", id="T13"
        ),
        pytest.param([ANTHROPIC], "auto", A_WITH_X, id="T14"),
        pytest.param([FLAT], "auto", A_WITH_X, id="T15"),
        pytest.param([A, TERMINAL], {"type": "tool", "name": "a"}, OF_A, id="T16"),
        pytest.param([tool("a>b")], "auto", None, id="T17-bracket"),
        pytest.param([tool("a\nb")], "auto", None, id="T17-newline"),
        pytest.param([tool("a", "x>")], "auto", None, id="T17-parameter"),
        pytest.param([tool("a>b"), B, tool("a", "x>")], "auto", OF_B, id="T17-one-of-three"),
        pytest.param([A, B], "required", (OF_A, OF_B), id="any-of-two"),
        pytest.param([], "auto", None, id="T18"),
        pytest.param(None, "auto", None, id="T18-absent"),
        pytest.param([A, TERMINAL], {"type": "any"}, TERMINAL_CALL, id="anthropic-any"),
        pytest.param([A], {"type": "none"}, None, id="anthropic-none"),
        pytest.param([A], None, OF_A, id="choice-absent"),
        pytest.param([A], "sometimes", OF_A, id="choice-unknown-word"),
        pytest.param([tool("a", "x"), tool("a", "y")], "auto", A_WITH_X, id="first-name-wins"),
        pytest.param([{"type": "web_search"}, A], "auto", OF_A, id="no-function"),
    ],
)
def test_the_calls_that_recovery_may_begin(
    tools: Any, choice: Any, expected: str | tuple[str, ...] | None
) -> None:
    """Each forced text contains the tool's name, also if there is more than one tool (T3)."""
    texts = expected if isinstance(expected, tuple) else (expected,) if expected else ()
    assert begun(tools, choice) == texts


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_calls_of_several_tools_begin_alike_up_to_the_name(family: str) -> None:
    names = ("read", "read_file", "write")
    syntax, declared = SYNTAXES[family], tools_of([tool(name, "x") for name in names])
    texts = syntax.beginnings(declared, ToolChoice("auto"))
    assert len({text[: text.index(name)] for name, text in zip(names, texts, strict=True)}) == 1
    assert not [a for a in texts for b in texts if a != b and b.startswith(a)]


@pytest.mark.parametrize("choice", [named("zzz"), {"type": "tool", "name": "zzz"}, {"type": "x"}])
def test_T6_a_demanded_tool_that_nobody_declared_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match=r"names the tool .*declared tools are: a, terminal"):
        begun([A, TERMINAL], choice)


def test_schemas_keep_their_order_and_choices_compare() -> None:
    assert tools_of([TERMINAL]) == (Tool("terminal", TERMINAL["function"]["parameters"]),)
    assert choice_of(named("a"), tools_of([A])) == ToolChoice("named", "a")
    assert tools_of("text") == ()


SCHEMA: dict[str, Any] = {
    "$defs": {
        "Place": {"properties": {"x": {"type": "number"}}, "type": "object"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    },
    "properties": {
        "text": {"type": "string"},
        "any": {},
        "place": {"$ref": "#/$defs/Place"},
        "inner": {"allOf": [{"$ref": "#/$defs/Place"}], "description": "where"},
        "loop": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/Nothing"},
        "some": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "level": {"enum": [1, 2]},
        "word": {"enum": ["1", "2"]},
        "odd": {"type": ["boolean", "object"]},
        "number": {"type": "number"},
        "either": {"type": ["string", "integer"]},
        "strange": {"type": [["integer"], {}], "anyOf": 3, "enum": 3},
        "stranger": 3,
    },
}


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "12", "12"),
        ("either", "12", "12"),
        ("any", "12", "12"),
        ("unknown", "12", "12"),
        ("place", '{"x": 1}', {"x": 1}),
        ("inner", '{"x": 1}', {"x": 1}),
        ("loop", "12", 12),
        ("lost", "12", "12"),
        ("some", "12", 12),
        ("some", "null", None),
        ("level", "1", 1),
        ("word", "1", "1"),
        ("odd", "True", True),
        ("odd", '{"A": "B"}', {"A": "B"}),
        ("strange", "1", "1"),
        ("stranger", "1", "1"),
        *[("number", text, text) for text in ("NaN", "-Infinity", "1e999", "9" * 5000, "x")],
        ("place", "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_text_becomes_the_value_its_schema_asks_for(
    parameter: str, text: str, value: object
) -> None:
    assert typed_value(text, Tool("f", SCHEMA), parameter) == value


def test_what_cannot_be_written_as_json_is_not_read_as_json() -> None:
    for text in ("NaN", "[Infinity]", "9" * 5000, "[" * 100_000, "x", ""):
        assert parse_json(text, None) is None
    assert parse_json('{"a": [1.5]}', None) == {"a": [1.5]}


def test_schemas_that_are_none_do_no_harm() -> None:
    for schema in ({"properties": 3}, {"properties": ["a"], "required": [["a"], {}]}):
        declared = tools_of([{"name": "a", "parameters": schema}])
        assert XML.beginnings(declared, ToolChoice("auto")) == (OF_A,)
        assert typed_value("1", declared[0], "a") == "1"
        parser = OutputParser(XML, declared)
        assert parser.push('{"a": 1}') + parser.finish()
