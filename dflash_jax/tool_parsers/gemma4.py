"""Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Keys are not quoted. Strings are enclosed in `<|"|>` and have no escapes; numbers, booleans, lists
and objects are written as in JSON. Reasoning is a channel. A turn that waits for a tool's result
ends in `<|tool_response>`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.syntax import (
    Quote,
    Syntax,
    Thought,
    as_json,
    as_rule,
    enum_texts,
    finite_parameters,
    parameter_schema,
)
from dflash_jax.tool_parsers.tool_schema import Tool, kinds_of

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


def _grammar(tool: Tool, quote: Quote) -> str:
    def value(name: str, schema: Any) -> str:
        if texts := enum_texts(schema):
            return "(" + " | ".join(quote(QUOTE + text + QUOTE) for text in texts) + ")"
        kinds = kinds_of(tool, name)
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:  # written as in JSON
            return as_rule(tool, parameter_schema(tool, name))
        return "quoted" if kinds == {"string"} else "value"

    pairs = [
        (f"{quote(name + ':')} {value(name, schema)}", needed)
        for name, schema, needed in finite_parameters(tool)
    ]
    needed = ' "," '.join(pair for pair, required in pairs if required)
    others = [pair for pair, required in pairs if not required]
    if needed:
        inner = " ".join([needed, *(f'("," {pair})?' for pair in others)])
    else:  # at most one: commas between optional parameters would depend on each other
        inner = "(" + " | ".join(others) + ")?" if others else ""
    head = quote(f"<|tool_call>call:{tool.name}{{")
    return f"{head} {inner} {quote('}<tool_call|>')}"


def _rules(quote: Quote) -> list[str]:
    mark = quote(QUOTE)
    text = "BARE" if mark.startswith('"') else "TEXT"
    return [
        f"quoted: {mark} {text} {mark}",
        'value: quoted | NUMBER | truth | "null" | list | object',
        'truth: "true" | "false"',
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        "KEY: /[A-Za-z0-9_]{1,64}/",
        "BARE: /[^<]*/",
        "NUMBER: /-?(0|[1-9][0-9]{0,17})([.][0-9]{1,17})?/",
    ]


GEMMA4 = Syntax(
    name="gemma4",
    thought=Thought("<|channel>thought\n", "<channel|>", "<channel|>"),
    opens=("<|tool_call>",),
    closes=("<tool_call|>",),
    lead="",
    marker="<|tool_call>",
    template_mark="<|tool_call>",
    begin=_begin,
    render=_render,
    grammar=_grammar,
    grammar_rules=_rules,
)
