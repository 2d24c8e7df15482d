"""Qwen3-Coder, Qwen3.5, Qwen3.6: `<function=NAME>` with `<parameter=KEY>` blocks.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

One newline on each side of a value is markup. Strings are written verbatim, other values as JSON;
the declared type decides how to parse them. The opening `<tool_call>` is optional: models omit it,
and so do forced calls.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.tool_parsers.syntax import (
    QWEN_THOUGHT,
    Quote,
    Syntax,
    as_json,
    as_rule,
    enum_texts,
    finite_parameters,
    parameter_schema,
)
from dflash_jax.tool_parsers.tool_schema import Tool, kinds_of


def _begin(name: str, parameter: str | None) -> str:
    return f"\n<function={name}>\n" + (f"<parameter={parameter}>\n" if parameter else "")


def _render(name: str, arguments: Mapping[str, Any]) -> str:
    values = {k: v if isinstance(v, str) else as_json(v) for k, v in arguments.items()}
    blocks = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


def _grammar(tool: Tool, quote: Quote) -> str:
    end = quote("\n</parameter>\n")

    def value(name: str, schema: Any) -> str:
        if texts := enum_texts(schema):
            return "(" + " | ".join(map(quote, texts)) + f") {end}"
        if "string" in (kinds_of(tool, name) or ("string",)):  # strings are written verbatim
            return "parameter"
        return f"{as_rule(tool, parameter_schema(tool, name))} {end}"

    blocks = []
    for name, schema, required in finite_parameters(tool):
        block = f"{quote(f'<parameter={name}>' + chr(10))} {value(name, schema)}"
        blocks.append(block if required else f"({block})?")
    head = f"<tool_call>\n<function={tool.name}>\n"
    return " ".join([quote(head), *blocks, quote("</function>\n</tool_call>")])


def _rules(quote: Quote) -> list[str]:
    return ['parameter[suffix="\\n</parameter>\\n"]: /(.|\\n)*/']


QWEN_XML = Syntax(
    name="qwen_xml",
    thought=QWEN_THOUGHT,
    opens=("<tool_call>", "<function="),
    closes=("</function>", "</tool_call>"),
    lead="\n",
    marker="<tool_call>",
    template_mark="<function=",
    begin=_begin,
    render=_render,
    grammar=_grammar,
    grammar_rules=_rules,
)
