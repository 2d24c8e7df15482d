"""Qwen3, Hermes and the shipped pair: one JSON object between `<tool_call>` tags.

<tool_call>
{"name": "NAME", "arguments": {"KEY": value}}
</tool_call>
"""

import json

from dflash_jax.tool_parsers.syntax import QWEN_THOUGHT, Syntax, json_calls

HERMES = Syntax(
    name="hermes",
    thought=QWEN_THOUGHT,
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    lead="\n",
    marker="<tool_call>",
    template_mark="<tool_call>",
    **json_calls(
        lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ',
        "}\n</tool_call>",
        lead="\n",
    ),
)
