"""Llama 3: the whole message is `{"name": "NAME", "parameters": {...}}`, one call per message.

No tags surround it, so a call is recognised by its first key, and complete when the JSON is.
Built-in tools come behind `<|python_tag|>`. There are no thoughts.
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.tool_parsers.syntax import CallState, Syntax, as_json


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
    read_state=_state,
)
