"""Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Keys are bare; texts stand between `<|"|>` marks without escapes, numbers, true, false, lists and
nested objects as one would guess. Thoughts are a channel; a turn that wants a tool's answer ends
in `<|tool_response>`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.syntax import Syntax, Thought, as_json

QUOTE = '<|"|>'


def value_text(value: Any) -> str:
    """A value as Gemma 4 writes it."""
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
