"""The syntax of each model family, from which its calls are parsed, forced, rendered and compiled.

The parsers of their calls are in `calls.py`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.tool_parsers.malformed_calls import FIRST_KEYS
from dflash_jax.tool_parsers.parameters import Form
from dflash_jax.tool_parsers.syntax import (
    CallState,
    Quote,
    Rule,
    Syntax,
    Thought,
    all_arguments,
    as_json,
    finite_forms,
    further_names,
    json_calls,
    parameter_rule,
)
from dflash_jax.tool_parsers.tool_schema import Tool, parameter_text

EMPTY = '""'  # a rule of no text
MOST_FURTHER = 16  # parameters of a call that the schema does not name
QWEN_THOUGHT = Thought("<think>", "</think>", "\n</think>\n\n")

# Qwen3, Hermes and the shipped pair: one JSON object between `<tool_call>` tags.
#
# <tool_call>
# {"name": "NAME", "arguments": {"KEY": value}}
# </tool_call>

HERMES_CALLS = json_calls(
    lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ',
    "}\n</tool_call>",
    lead="\n",
)
HERMES = Syntax(
    name="hermes",
    thought=QWEN_THOUGHT,
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    lead="\n",
    marker="<tool_call>",
    template_mark="<tool_call>",
    begin=HERMES_CALLS.begin,
    render=HERMES_CALLS.render,
    grammar=HERMES_CALLS.grammar,
)


# Llama 3: the whole message is `{"name": "NAME", "parameters": {...}}`, one call per message.
#
# There are no tags: a call is recognized by its first key, and ends with the JSON object. Models
# also write `{"type": "function", "name": ...}` and the whole object of OpenAI's API. Calls of
# built-in tools follow `<|python_tag|>`. There is no reasoning.


def _llama_state(syntax: Syntax, text: str) -> CallState:
    begun = min((at for marker in syntax.opens if (at := text.find(marker)) >= 0), default=-1)
    if begun < 0:
        return CallState.NONE
    start = text.find("{", begun)
    try:
        json.JSONDecoder().raw_decode(text, start if start >= 0 else len(text))
    except (json.JSONDecodeError, RecursionError):
        return CallState.OPEN
    return CallState.COMPLETE


LLAMA_CALLS = json_calls(
    lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}", lead="\n"
)
LLAMA = Syntax(
    name="llama",
    thought=None,
    opens=(*(f"{{{key}" for key in FIRST_KEYS), "<|python_tag|>"),
    closes=("}",),
    lead="\n",
    marker='{"name"',
    template_mark="<|start_header_id|>",
    parallel=False,
    read_state=_llama_state,
    begin=LLAMA_CALLS.begin,
    render=LLAMA_CALLS.render,
    grammar=LLAMA_CALLS.grammar,
)


# gpt-oss (Harmony): messages in channels; a call is a message to `functions.NAME`.
#
#     <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>
#     {"KEY": value}<|call|>
#
# (in one line). Models sometimes leave `functions.` out.
#
# Reasoning is the analysis channel, answers are the final one. Text is a message of its own, so a
# forced call first ends the open message.

ASSISTANT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
RECIPIENT = " to="
# Who a message in the header of which is a recipient goes to, in its two places; the tools that the
# model was trained with run elsewhere.
CALL_HEADER = re.compile(
    r"(?:^|<\|start\|>assistant|<\|channel\|>\w+) to=(?!python\b|browser\b|container\b)"
)


def _harmony_header(name: str) -> str:
    return f"<|channel|>commentary{RECIPIENT}functions.{name} <|constrain|>json<|message|>"


def _harmony_state(syntax: Syntax, text: str) -> CallState:
    begun = max((match.start() for match in CALL_HEADER.finditer(text)), default=-1)
    if begun < 0:
        return CallState.NONE
    closed = max(text.rfind(marker) for marker in syntax.closes)
    return CallState.OPEN if begun > closed else CallState.COMPLETE


def _harmony_grammar(tool: Tool, quote: Quote) -> Rule:
    """Return the rule of a call after a prompt that ends in `ASSISTANT`, without the end token."""
    return Rule(f"{quote(_harmony_header(tool.name))} {all_arguments(tool)}")


HARMONY_CALLS = json_calls(
    lambda name: ASSISTANT + _harmony_header(name), "<|call|>", lead="<|end|>"
)
HARMONY = Syntax(
    name="harmony",
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{ASSISTANT}{FINAL}"),
    opens=(f"{RECIPIENT}functions.",),
    closes=("<|call|>",),
    read_state=_harmony_state,
    lead="<|end|><|start|>assistant<|channel|>",
    marker="commentary",
    template_mark="<|channel|>",
    parallel=False,
    channels=(f"{ASSISTANT}{FINAL}<|end|><|call|>",),
    before_answer=ASSISTANT,
    answer_header=FINAL,
    begin=HARMONY_CALLS.begin,
    render=HARMONY_CALLS.render,
    grammar=_harmony_grammar,
)


# Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.
#
# Keys are not quoted. Strings are enclosed in `<|"|>` and have no escapes; numbers, booleans, lists
# and objects are written as in JSON. Reasoning is a channel. A turn that waits for a tool's result
# ends in `<|tool_response>`.

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


def _gemma_begin(name: str, parameter: str | None) -> str:
    head = f"<|tool_call>call:{name}{{"
    return f"{head}{parameter}:" if parameter else head


def _gemma_render(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<|tool_call>call:{name}{value_text(arguments)}<tool_call|>"


def _gemma_grammar(tool: Tool, quote: Quote) -> Rule:
    def value(schema: Any) -> str:
        meaning = tool.merged.meaning_of(schema)
        if meaning.values:
            return "(" + " | ".join(quote(value_text(x)) for x in meaning.values) + ")"
        kinds = meaning.kinds
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:  # written as in JSON
            return parameter_rule(tool, schema)
        return "quoted" if kinds == {"string"} else "value"

    terminals: dict[str, str] = {}

    def arguments(form: Form) -> str:
        pairs = {name: f"{quote(name + ':')} {value(x)}" for name, x in form.properties.items()}
        needed = ' "," '.join(pair for name, pair in pairs.items() if name in form.required)
        others = [pair for name, pair in pairs.items() if name not in form.required]
        further = []
        for name, terminal, schema in further_names(form, "", ":"):
            terminals[name] = terminal
            further.append(f"{name} {value(schema)}")
        some = " | ".join(further)
        more = f'("," ({some})){{0,{MOST_FURTHER}}}' if further else ""
        if needed:
            return " ".join([needed, *(f'("," {pair})?' for pair in others), more])
        # At most one of those that are named: commas between them would depend on each other.
        first = " | ".join([*others, *further])
        return f"(({first}) {more})?" if first else EMPTY

    inner = " | ".join(map(arguments, finite_forms(tool)))
    head = quote(f"<|tool_call>call:{tool.name}{{")
    return Rule(f"{head} ({inner}) {quote('}<tool_call|>')}", terminals)


def _gemma_rules(quote: Quote) -> list[str]:
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
    begin=_gemma_begin,
    render=_gemma_render,
    grammar=_gemma_grammar,
    grammar_rules=_gemma_rules,
)


# Qwen3-Coder, Qwen3.5, Qwen3.6: `<function=NAME>` with `<parameter=KEY>` blocks.
#
#     <tool_call>
#     <function=NAME>
#     <parameter=KEY>
#     value
#     </parameter>
#     </function>
#     </tool_call>
#
# One newline on each side of a value is markup. Strings are written verbatim, other values as
# JSON; the declared type decides how to parse them. The opening `<tool_call>` is optional: models
# omit it, and so do forced calls.


def _qwen_begin(name: str, parameter: str | None) -> str:
    head = f"\n<function={name}>\n"
    return f"{head}<parameter={parameter}>\n" if parameter else head


def _qwen_render(name: str, arguments: Mapping[str, Any]) -> str:
    values = {name: parameter_text(value) for name, value in arguments.items()}
    blocks = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


def _qwen_grammar(tool: Tool, quote: Quote) -> Rule:
    end = quote("\n</parameter>\n")

    def value(schema: Any) -> str:
        meaning = tool.merged.meaning_of(schema)
        if meaning.values:
            return "(" + " | ".join(quote(parameter_text(x)) for x in meaning.values) + f") {end}"
        if "string" in (meaning.kinds or ("string",)):  # strings are written verbatim
            return "parameter"
        return f"{parameter_rule(tool, schema)} {end}"

    terminals: dict[str, str] = {}

    def arguments(form: Form) -> str:
        blocks = []
        for name, schema in form.properties.items():
            block = f"{quote(f'<parameter={name}>' + chr(10))} {value(schema)}"
            blocks.append(block if name in form.required else f"({block})?")
        further = []
        for name, terminal, schema in further_names(form, "<parameter=", ">\n"):
            terminals[name] = terminal
            further.append(f"{name} {value(schema)}")
        if further:
            blocks.append("(" + " | ".join(further) + f"){{0,{MOST_FURTHER}}}")
        return " ".join(blocks) or EMPTY

    inner = " | ".join(map(arguments, finite_forms(tool)))
    head = quote(f"<tool_call>\n<function={tool.name}>\n")
    tail = quote("</function>\n</tool_call>")
    return Rule(f"{head} ({inner}) {tail}", terminals)


def _qwen_rules(quote: Quote) -> list[str]:
    return ['parameter[suffix="\\n</parameter>\\n"]: /(.|\\n)*/']


QWEN_XML = Syntax(
    name="qwen_xml",
    thought=QWEN_THOUGHT,
    opens=("<tool_call>", "<function="),
    closes=("</function>", "</tool_call>"),
    lead="\n",
    marker="<tool_call>",
    template_mark="<function=",
    begin=_qwen_begin,
    render=_qwen_render,
    grammar=_qwen_grammar,
    grammar_rules=_qwen_rules,
)
