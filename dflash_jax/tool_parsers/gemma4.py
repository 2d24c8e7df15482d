"""Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Keys are not quoted. Strings are enclosed in `<|"|>` and have no escapes; numbers, booleans, lists
and objects are written as in JSON. Reasoning is a channel. A turn that waits for a tool's result
ends in `<|tool_response>`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.syntax import Syntax, Thought, as_json

QUOTE = '<|"|>'


def value_text(value: Any) -> str:
    """Return a value in Gemma 4's notation."""
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case Mapping():
            return "{" + ",".join(f"{k}:{value_text(v)}" for k, v in value.items()) + "}"
        case Sequence():
            return "[" + ",".join(map(value_text, value)) + "]"
        case _:
            return as_json(value)


def _begin(name: str, parameter: str | None) -> str:
    return f"<|tool_call>call:{name}{{" + (f"{parameter}:" if parameter else "")


def _render(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<|tool_call>call:{name}{value_text(arguments)}<tool_call|>"


GEMMA4 = Syntax(
    name="gemma4",
    thought=Thought("<|channel>thought\n", "<channel|>", "<channel|>"),
    opens=("<|tool_call>",),
    closes=("<tool_call|>",),
    opening="<|tool_call>call:",
    lead="",
    marker="<|tool_call>",
    begin=_begin,
    render=_render,
)
