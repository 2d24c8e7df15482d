"""Llama 3: the whole message is `{"name": "NAME", "parameters": {...}}`, one call per message.

There are no tags: a call is recognized by its first key, and ends with the JSON object. Calls of
built-in tools follow `<|python_tag|>`. There is no reasoning.
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.tool_parsers.syntax import CallState, Quote, Syntax, all_arguments, as_json
from dflash_jax.tool_parsers.tool_schema import Tool


def _begin(name: str, parameter: str | None) -> str:
    text = f'\n{{"name": "{name}", "parameters":'
    return text + f' {{"{parameter}":' if parameter else text


def _render(name: str, arguments: Mapping[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'


def _state(syntax: Syntax, text: str) -> CallState:
    begun = min((at for marker in syntax.opens if (at := text.find(marker)) >= 0), default=-1)
    if begun < 0:
        return CallState.NONE
    start = text.find("{", begun)
    try:
        json.JSONDecoder().raw_decode(text, start if start >= 0 else len(text))
    except (json.JSONDecodeError, RecursionError):
        return CallState.OPEN
    return CallState.COMPLETE


def _grammar(tool: Tool, quote: Quote) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
    return f"{quote(head)} {all_arguments(tool)} {quote('}')}"


LLAMA = Syntax(
    name="llama",
    thought=None,
    opens=('{"name"', "<|python_tag|>"),
    closes=("}",),
    opening='\n{"name":',
    lead="\n",
    marker='{"name"',
    begin=_begin,
    render=_render,
    grammar=_grammar,
    parallel=False,
    read_state=_state,
)
