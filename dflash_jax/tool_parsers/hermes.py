"""Qwen3, Hermes and the shipped pair: one JSON object between `<tool_call>` tags.

<tool_call>
{"name": "NAME", "arguments": {"KEY": value}}
</tool_call>
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.tool_parsers.syntax import QWEN_THOUGHT, Quote, Syntax, all_arguments, as_json
from dflash_jax.tool_parsers.tool_schema import Tool


def _begin(name: str, parameter: str | None) -> str:
    text = f'\n<tool_call>\n{{"name": "{name}", "arguments":'
    return text + f' {{"{parameter}":' if parameter else text


def _render(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'


def _grammar(tool: Tool, quote: Quote) -> str:
    head = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
    closing = quote("}\n</tool_call>")
    return f"{quote(head)} {all_arguments(tool)} {closing}"


HERMES = Syntax(
    name="hermes",
    thought=QWEN_THOUGHT,
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    opening='\n<tool_call>\n{"name":',
    lead="\n",
    marker="<tool_call>",
    begin=_begin,
    render=_render,
    grammar=_grammar,
)
