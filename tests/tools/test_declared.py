"""Which call recovery would begin, for every shape of tools and tool choices."""

from typing import Any

import pytest

from dflash_jax.errors import RequestError
from dflash_jax.tools import SYNTAXES
from dflash_jax.tools.declared import Choice, Tool, call_beginning, choice_of, tools_of

XML = SYNTAXES["qwen_xml"]
OPEN = "\n<function="


def tool(name: str, *parameters: str, required: list | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {p: {} for p in parameters}}
    if required is not None:
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def begun(tools: Any, tool_choice: Any = "auto") -> str | None:
    declared = tools_of(tools)
    return call_beginning(declared, choice_of(tool_choice, declared), XML)


A, B, TERMINAL = tool("a"), tool("b"), tool("terminal", "command")
TERMINAL_CALL = "\n<function=terminal>\n<parameter=command>\n"
ANTHROPIC = {"name": "a", "input_schema": {"properties": {"x": {}}}}
FLAT = {"type": "function", "name": "a", "parameters": {"properties": {"x": {}}}}
A_WITH_X = "\n<function=a>\n<parameter=x>\n"
OF_A = "\n<function=a>\n"


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        pytest.param([TERMINAL], "auto", TERMINAL_CALL, id="T1"),
        pytest.param([A, TERMINAL], "auto", TERMINAL_CALL, id="T2"),
        pytest.param([tool("a", "x"), B], "auto", OPEN, id="T3"),
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
def test_the_call_that_recovery_begins(tools: Any, choice: Any, expected: str | None) -> None:
    assert begun(tools, choice) == expected


@pytest.mark.parametrize("choice", [named("zzz"), {"type": "tool", "name": "zzz"}, {"type": "x"}])
def test_T6_a_demanded_tool_that_nobody_declared_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match=r"names the tool .*declared tools are: a, terminal"):
        begun([A, TERMINAL], choice)


def test_schemas_keep_their_order_and_choices_compare() -> None:
    assert tools_of([TERMINAL]) == (Tool("terminal", TERMINAL["function"]["parameters"]),)
    assert choice_of(named("a"), tools_of([A])) == Choice("named", "a")
    assert tools_of("text") == ()
