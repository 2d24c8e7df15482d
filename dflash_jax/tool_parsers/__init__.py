"""Syntax of tool calls and reasoning of each model family, and an incremental parser.

`SYNTAXES` maps names to families; `syntax_of` detects the one of a chat template. A `Syntax`
describes the markup: recovery forces calls with it, `stream.OutputParser` parses outputs with it,
and `grammar` builds grammars from it. Pure Python, without JAX.
"""

from dflash_jax.tool_parsers.families import GEMMA4, HARMONY, HERMES, LLAMA, QWEN_XML
from dflash_jax.tool_parsers.syntax import CallState, Syntax, Thought

# The first whose mark a template contains is that of the template, so Qwen's XML calls, which are
# inside `<tool_call>`, precede JSON calls.
SYNTAXES: dict[str, Syntax] = {s.name: s for s in (GEMMA4, HARMONY, QWEN_XML, HERMES, LLAMA)}


def syntax_of(template: str | None) -> Syntax | None:
    """Return the syntax of a chat template, or None if it is unknown."""
    return next((s for s in SYNTAXES.values() if s.template_mark in (template or "")), None)


def tools_warning(template: str | None) -> str | None:
    """Return why tools have no effect, or less than expected, with a chat template, or None."""
    if "tools" not in (template or ""):
        return (
            "the chat template has no place for tools: the prompt does not name them, and recovery"
            " begins no calls; give the model a template with tools (chat_template.jinja)"
        )
    if syntax_of(template) is None:
        return (
            "the chat template's syntax of tool calls is unknown: recovery begins no calls; use a"
            f" template of one of these syntaxes: {', '.join(SYNTAXES)}"
        )
    return None


__all__ = ["SYNTAXES", "CallState", "Syntax", "Thought", "syntax_of", "tools_warning"]
