"""gpt-oss (Harmony): messages in channels; a call is a message to `functions.NAME`.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>
    {"KEY": value}<|call|>

(in one line).

Reasoning is the analysis channel, answers are the final one. Text is a message of its own, so a
forced call first ends the open message.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.tool_parsers.syntax import Quote, Syntax, Thought, all_arguments, as_json
from dflash_jax.tool_parsers.tool_schema import Tool

ASSISTANT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
_CALL = f"{ASSISTANT}<|channel|>commentary to=functions."
_ARGUMENTS = " <|constrain|>json<|message|>"


def _begin(name: str, parameter: str | None) -> str:
    return f"<|end|>{_CALL}{name}{_ARGUMENTS}" + (f'{{"{parameter}":' if parameter else "")


def _render(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{_CALL}{name}{_ARGUMENTS}{as_json(arguments)}<|call|>"


def _grammar(tool: Tool, quote: Quote) -> str:
    head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return f"{quote(head)} {all_arguments(tool)}"


HARMONY = Syntax(
    name="harmony",
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{ASSISTANT}{FINAL}"),
    opens=(" to=functions.",),
    closes=("<|call|>",),
    opening=f"<|end|>{_CALL}",
    lead="<|end|><|start|>assistant<|channel|>",
    marker="commentary",
    begin=_begin,
    render=_render,
    grammar=_grammar,
    parallel=False,
    channels=(f"{ASSISTANT}{FINAL}<|end|><|call|>",),
    before_answer=ASSISTANT,
    answer_header=FINAL,
)
