"""Llama 3: the whole message is `{"name": "NAME", "parameters": {...}}`, one call per message.

There are no tags: a call is recognized by its first key, and ends with the JSON object. Calls of
built-in tools follow `<|python_tag|>`. There is no reasoning.
"""

import json

from dflash_jax.tool_parsers.syntax import CallState, Syntax, json_calls


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
    lead="\n",
    marker='{"name"',
    template_mark="<|start_header_id|>",
    parallel=False,
    read_state=_state,
    **json_calls(lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}", lead="\n"),
)
