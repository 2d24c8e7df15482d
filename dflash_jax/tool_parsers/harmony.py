"""gpt-oss (Harmony): messages in channels; a call is a message to `functions.NAME`.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>
    {"KEY": value}<|call|>

(in one line).

Reasoning is the analysis channel, answers are the final one. Text is a message of its own, so a
forced call first ends the open message.
"""

from dflash_jax.tool_parsers.syntax import Quote, Syntax, Thought, all_arguments, json_calls
from dflash_jax.tool_parsers.tool_schema import Tool

ASSISTANT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
RECIPIENT = " to=functions."


def _header(name: str) -> str:
    return f"<|channel|>commentary{RECIPIENT}{name} <|constrain|>json<|message|>"


def _grammar(tool: Tool, quote: Quote) -> str:
    """Return the rule of a call after a prompt that ends in `ASSISTANT`, without the end token."""
    return f"{quote(_header(tool.name))} {all_arguments(tool)}"


HARMONY = Syntax(
    name="harmony",
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{ASSISTANT}{FINAL}"),
    opens=(RECIPIENT,),
    closes=("<|call|>",),
    lead="<|end|><|start|>assistant<|channel|>",
    marker="commentary",
    template_mark="<|channel|>",
    parallel=False,
    channels=(f"{ASSISTANT}{FINAL}<|end|><|call|>",),
    before_answer=ASSISTANT,
    answer_header=FINAL,
    **json_calls(lambda name: ASSISTANT + _header(name), "<|call|>", lead="<|end|>")
    | {"grammar": _grammar},
)
