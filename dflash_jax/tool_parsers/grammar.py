"""Grammars of tool calls, in llguidance's dialect of Lark.

Special tokens are written as `<name>`, other text as strings, and arguments as JSON schemas.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import bounded
from dflash_jax.tool_parsers.finite_schema import FiniteSchema, endless, relocated
from dflash_jax.tool_parsers.gemma4 import QUOTE
from dflash_jax.tool_parsers.harmony import ASSISTANT, FINAL
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice, kinds_of

Quote = Callable[[str], str]
WHOLE = "parameters"  # a definition with those of the tool, for references between them
MOST_CALLS = 64  # of one output


def call_grammar(
    syntax: Syntax,
    tools: Sequence[Tool],
    choice: ToolChoice,
    specials: Collection[str],
    *,
    thinking: bool = False,
    thoughts: bool = True,
    parallel: bool = True,
    answer: bool = False,
) -> str:
    """Return a Lark grammar of one or more tool calls after optional reasoning.

    Args:
      choice: "named" allows one tool, other kinds allow all.
      specials: texts of the tokenizer's special tokens.
      thinking: the prompt ends inside reasoning, which has to be closed first.
      thoughts: the output may start with reasoning.
      parallel: allow more than one call.
      answer: also allow the rule `answer` in place of calls.

    Raises:
      RequestError: the arguments of a tool cannot be followed, or have no finite value.
    """
    allowed = [tool for tool in tools if choice.kind != "named" or tool.name == choice.name]

    def quote(text: str) -> str:
        """Return a text as grammar terminals: special tokens by name, the rest as strings."""
        return _terminals(text, specials)

    calls = " | ".join(_CALLS[syntax.name](tool, quote) for tool in allowed)
    more_than_one = parallel and syntax.name in ("hermes", "qwen_xml", "gemma4")
    start = f"call (/\\n/ call){{0,{MOST_CALLS - 1}}}" if more_than_one else "call"
    start = f"({start} | {_answer(syntax, quote)})" if answer else start
    opened, thought = _thought(syntax, quote, thinking=thinking, thoughts=thoughts)
    lines = [f"start: {opened} {start}", f"call: {calls}", *thought, *_rules(syntax, quote)]
    return "\n".join(lines)


def answer_grammar(
    syntax: Syntax, specials: Collection[str], *, thinking: bool = False, thoughts: bool = True
) -> str:
    """Return a Lark grammar of the rule `answer` after optional reasoning.

    Args:
      specials: texts of the tokenizer's special tokens.
      thinking: the prompt ends inside reasoning, which has to be closed first.
      thoughts: the output may start with reasoning.
    """

    def quote(text: str) -> str:
        return _terminals(text, specials)

    opened, rules = _thought(syntax, quote, thinking=thinking, thoughts=thoughts)
    return "\n".join([f"start: {opened} {_answer(syntax, quote)}", *rules])


def _answer(syntax: Syntax, quote: Quote) -> str:
    """Return the rule `answer` with the markup that the family writes before answers."""
    return f"{quote(FINAL)} @answer" if syntax.name == "harmony" else "@answer"


def _thought(
    syntax: Syntax, quote: Quote, *, thinking: bool, thoughts: bool
) -> tuple[str, list[str]]:
    """Return the start of an output that may be reasoning, and the rules that it refers to."""
    if syntax.thought is None or not (thinking or thoughts):
        return "", THOUGHT if syntax.thought else []
    opening, closing = quote(syntax.thought.opening), quote(syntax.thought.closing)
    after = quote(ASSISTANT) if syntax.name == "harmony" else "BLANK"
    if closing.startswith('"'):  # no token of its own: reasoning ends with the first such text
        rules, body = [f"thought[suffix={closing}]: /(.|\\n)*/"], f"thought {after}"
    else:
        rules, body = [], f"TEXT {closing} {after}"
    return body if thinking else f"({opening} {body})?", [*rules, *THOUGHT]


# The blank is bounded, as a model could write nothing else until its limit.
THOUGHT = [r"TEXT: /(.|\n)*/", r"BLANK: /\n{0,2}/"]


def _terminals(text: str, specials: Collection[str]) -> str:
    matches = [(text.find(s), s) for s in specials if s and s in text]
    if not matches:
        return json.dumps(text, ensure_ascii=False) if text else ""
    at, special = min(matches)
    parts = [
        _terminals(text[:at], specials),
        special,
        _terminals(text[at + len(special) :], specials),
    ]
    return " ".join(part for part in parts if part)


def _schema(tool: Tool) -> str:
    return _json(tool, tool.parameters or {"type": "object"})


def _json(tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return a schema of a tool as a part of a rule.

    Raises:
      RequestError: a number cannot be followed exactly, or no finite value fits the schema.
    """
    try:
        return f"%json {json.dumps(bounded(schema))}"
    except RequestError as error:
        raise RequestError(f"the tool {tool.name!r}: {error}") from error


def _parameter_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """Return the schema of one parameter with the definitions that its references need."""
    schema = tool.properties[name]
    if not isinstance(schema, Mapping):
        return {}
    if '"$ref"' not in json.dumps(schema):
        return schema
    moved = relocated(tool.parameters, "#", f"#/$defs/{WHOLE}")
    path = "/properties/" + name.replace("~", "~0").replace("/", "~1")
    return {"$ref": f"#/$defs/{WHOLE}{path}", "$defs": {WHOLE: moved}}


def _hermes(tool: Tool, quote: Quote) -> str:
    head = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
    closing = quote("}\n</tool_call>")
    return f"{quote(head)} {_schema(tool)} {closing}"


def _llama(tool: Tool, quote: Quote) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
    return f"{quote(head)} {_schema(tool)} {quote('}')}"


def _harmony(tool: Tool, quote: Quote) -> str:
    head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return f"{quote(head)} {_schema(tool)}"


def _xml(tool: Tool, quote: Quote) -> str:
    end = quote("\n</parameter>\n")

    def value(name: str, schema: Any) -> str:
        if texts := _enum_texts(schema):
            return "(" + " | ".join(map(quote, texts)) + f") {end}"
        if "string" in (kinds_of(tool, name) or ("string",)):  # strings are written verbatim
            return "parameter"
        return f"{_json(tool, _parameter_schema(tool, name))} {end}"

    blocks = []
    for name, schema, required in _parameters(tool):
        block = f"{quote(f'<parameter={name}>' + chr(10))} {value(name, schema)}"
        blocks.append(block if required else f"({block})?")
    head = f"<tool_call>\n<function={tool.name}>\n"
    return " ".join([quote(head), *blocks, quote("</function>\n</tool_call>")])


def _gemma4(tool: Tool, quote: Quote) -> str:
    def value(name: str, schema: Any) -> str:
        if texts := _enum_texts(schema):
            return "(" + " | ".join(quote(QUOTE + text + QUOTE) for text in texts) + ")"
        kinds = kinds_of(tool, name)
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:  # written as in JSON
            return _json(tool, _parameter_schema(tool, name))
        return "quoted" if kinds == {"string"} else "value"

    pairs = [
        (f"{quote(name + ':')} {value(name, schema)}", needed)
        for name, schema, needed in _parameters(tool)
    ]
    needed = ' "," '.join(pair for pair, required in pairs if required)
    others = [pair for pair, required in pairs if not required]
    if needed:
        inner = " ".join([needed, *(f'("," {pair})?' for pair in others)])
    else:  # at most one: commas between optional parameters would depend on each other
        inner = "(" + " | ".join(others) + ")?" if others else ""
    head = quote(f"<|tool_call>call:{tool.name}{{")
    return f"{head} {inner} {quote('}<tool_call|>')}"


def _parameters(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Return (name, schema, required) of the parameters in declaration order.

    Optional parameters without a finite value are left out.

    Raises:
      RequestError: a required parameter has no finite value.
    """
    finite = FiniteSchema(tool.parameters)
    if not finite.ends(tool.parameters):
        raise RequestError(f"the tool {tool.name!r}: {endless(finite)}")
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    return [
        (name, schema, name in required)
        for name, schema in tool.properties.items()
        if schema is not False and finite.ends(schema)
    ]


def _enum_texts(schema: Any) -> list[str]:
    """Return the values of a string enum; empty for other schemas."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return values if isinstance(values, list) and all(isinstance(v, str) for v in values) else []


def _rules(syntax: Syntax, quote: Quote) -> list[str]:
    """Return the rules that the calls of a family refer to."""
    if syntax.name == "qwen_xml":
        return ['parameter[suffix="\\n</parameter>\\n"]: /(.|\\n)*/']
    if syntax.name != "gemma4":
        return []
    mark = quote(QUOTE)
    return [
        f"quoted: {mark} TEXT {mark}"
        if not mark.startswith('"')
        else f"quoted: {mark} BARE {mark}",
        'value: quoted | NUMBER | truth | "null" | list | object',
        'truth: "true" | "false"',
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        "KEY: /[A-Za-z0-9_]{1,64}/",
        "BARE: /[^<]*/",
        "NUMBER: /-?(0|[1-9][0-9]{0,17})([.][0-9]{1,17})?/",
    ]


_CALLS: dict[str, Callable[[Tool, Quote], str]] = {
    "hermes": _hermes,
    "llama": _llama,
    "harmony": _harmony,
    "qwen_xml": _xml,
    "gemma4": _gemma4,
}
