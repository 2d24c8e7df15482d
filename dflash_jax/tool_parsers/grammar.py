"""Grammars of tool calls, in llguidance's dialect of Lark.

Special tokens are written as `<name>`, other text as strings, and arguments as JSON schemas.
"""

import functools
import json
from collections.abc import Collection, Sequence

from dflash_jax.tool_parsers.syntax import Quote, Syntax
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice

MOST_CALLS = 64  # calls of one output


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
      choice: "named" allows one call of one tool, other kinds allow calls of all.
      specials: texts of the tokenizer's special tokens.
      thinking: the prompt ends inside reasoning, which has to be closed first.
      thoughts: the output may start with reasoning.
      parallel: allow more than one call.
      answer: also allow the rule `answer` in place of calls.

    Raises:
      RequestError: the arguments of a tool cannot be followed, or have no finite value.
    """
    allowed = [tool for tool in tools if choice.kind != "named" or tool.name == choice.name]
    quote = functools.partial(_terminals, specials=specials)
    rules = [syntax.grammar(tool, quote) for tool in allowed]
    calls = " | ".join(rule.text for rule in rules)
    terminals = {name: text for rule in rules for name, text in rule.terminals.items()}
    several = parallel and syntax.parallel and choice.kind != "named"
    start = f"call (/\\n/ call){{0,{MOST_CALLS - 1}}}" if several else "call"
    start = f"({start} | {_answer(syntax, quote)})" if answer else start
    opened, thought = _thought(syntax, quote, thinking=thinking, thoughts=thoughts)
    lines = [f"start: {opened} {start}", f"call: {calls}", *thought, *syntax.grammar_rules(quote)]
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in terminals.items())])


def answer_grammar(
    syntax: Syntax, specials: Collection[str], *, thinking: bool = False, thoughts: bool = True
) -> str:
    """Return a Lark grammar of the rule `answer` after optional reasoning.

    Args:
      specials: texts of the tokenizer's special tokens.
      thinking: the prompt ends inside reasoning, which has to be closed first.
      thoughts: the output may start with reasoning.
    """
    quote = functools.partial(_terminals, specials=specials)
    opened, rules = _thought(syntax, quote, thinking=thinking, thoughts=thoughts)
    return "\n".join([f"start: {opened} {_answer(syntax, quote)}", *rules])


def _answer(syntax: Syntax, quote: Quote) -> str:
    """Return the rule `answer` with the markup that the family writes before answers."""
    return f"{quote(syntax.answer_header)} @answer".lstrip()


def _thought(
    syntax: Syntax, quote: Quote, *, thinking: bool, thoughts: bool
) -> tuple[str, list[str]]:
    """Return the start of an output that may be reasoning, and the rules that it refers to."""
    if syntax.thought is None or not (thinking or thoughts):
        return "", THOUGHT if syntax.thought else []
    opening = quote(syntax.thought.opening)
    closing = quote(syntax.thought.closing)
    after = quote(syntax.before_answer) or "BLANK"
    if closing.startswith('"'):  # no token of its own: reasoning ends with the first such text
        rules = [f"thought[suffix={closing}]: /(.|\\n)*/"]
        body = f"thought {after}"
    else:
        rules = []
        body = f"TEXT {closing} {after}"
    return body if thinking else f"({opening} {body})?", [*rules, *THOUGHT]


# The blank is bounded, as a model could write nothing else until its limit.
THOUGHT = [r"TEXT: /(.|\n)*/", r"BLANK: /\n{0,2}/"]


def _terminals(text: str, specials: Collection[str]) -> str:
    """Return a text as grammar terminals: special tokens by name, the rest as strings."""
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
