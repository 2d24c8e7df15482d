"""The grammar of an answer that has to call a tool, in llguidance's dialect of Lark.

Special tokens stand in it as `<name>`, everything else as strings, arguments as JSON schemas.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tools.declared import Choice, Tool
from dflash_jax.tools.syntax import Syntax

Quote = Callable[[str], str]
SPACE = r"( |\n {0,16})?"  # between JSON's symbols: a model may not dwell on it for ever


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema whose texts have little white space, if it does not say how much itself."""
    return {"x-guidance": {"whitespace_pattern": SPACE}, **schema}


def call_grammar(
    syntax: Syntax,
    tools: Sequence[Tool],
    choice: Choice,
    specials: Collection[str],
    *,
    thinking: bool = False,
    thoughts: bool = True,
    parallel: bool = True,
) -> str:
    """A Lark grammar of one call or several, behind an optional thought.

    Args:
      choice: "required" allows every tool, "named" one.
      specials: texts of the tokenizer's special tokens.
      thinking: the prompt opened a thought, which has to be closed first.
      thoughts: the output may begin with a thought.

    Raises:
      RequestError: calls of this family cannot be demanded.
    """
    if syntax.name not in _CALLS:
        raise RequestError(f"calls cannot be demanded in the syntax {syntax.name}; use auto")
    allowed = [tool for tool in tools if choice.kind != "named" or tool.name == choice.name]

    def quote(text: str) -> str:
        """A text as grammar symbols: its special tokens by name, the rest as strings."""
        return _symbols(text, specials)

    calls = " | ".join(_CALLS[syntax.name](tool, quote) for tool in allowed)
    several = parallel and syntax.name in ("hermes", "qwen_xml", "gemma4")
    lines = [f"call: {calls}"]
    start = "call (/\\n/ call)*" if several else "call"
    if thought := syntax.thought:
        body = f"TEXT {quote(thought.closing)} BLANK"
        opened = body if thinking else f"({quote(thought.opening)} {body})?" if thoughts else ""
        start = f"{opened} {start}"
        lines += ["TEXT: /(.|\\n)*/", "BLANK: /\\n*/"]
    return "\n".join([f"start: {start}", *lines, "VALUE: /[^<]*/"])


def _symbols(text: str, specials: Collection[str]) -> str:
    found = [(text.find(s), s) for s in specials if s and s in text]
    if not found:
        return json.dumps(text, ensure_ascii=False) if text else ""
    at, special = min(found)
    parts = [_symbols(text[:at], specials), special, _symbols(text[at + len(special) :], specials)]
    return " ".join(part for part in parts if part)


def _schema(tool: Tool) -> str:
    return f"%json {json.dumps(bounded(tool.parameters or {'type': 'object'}))}"


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
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    blocks = []
    for name in properties if isinstance(properties, dict) else ():
        block = f"{quote(f'<parameter={name}>' + chr(10))} VALUE {quote('</parameter>' + chr(10))}"
        blocks.append(block if name in required else f"({block})?")
    head = f"<tool_call>\n<function={tool.name}>\n"
    return " ".join([quote(head), *blocks, quote("</function>\n</tool_call>")])


_CALLS: dict[str, Callable[[Tool, Quote], str]] = {
    "hermes": _hermes,
    "llama": _llama,
    "harmony": _harmony,
    "qwen_xml": _xml,
}
