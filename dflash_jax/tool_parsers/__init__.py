"""Tool calls and thoughts as text: one file per family's syntax, free of jax.

`SYNTAXES` knows them by name, `syntax_of` finds the one a chat template teaches. Here are the
facts (markers, how a call begins, how it is written); who forces a call's beginning and who
parses calls out of a stream build on them.
"""

from dflash_jax.tool_parsers.gemma4 import GEMMA4
from dflash_jax.tool_parsers.harmony import HARMONY
from dflash_jax.tool_parsers.hermes import HERMES
from dflash_jax.tool_parsers.llama import LLAMA
from dflash_jax.tool_parsers.qwen_xml import QWEN_XML
from dflash_jax.tool_parsers.syntax import CallState, Syntax, Thought

SYNTAXES: dict[str, Syntax] = {s.name: s for s in (GEMMA4, HARMONY, QWEN_XML, HERMES, LLAMA)}

# A text that only this family's templates contain; the first that is found decides, so the XML
# calls inside Qwen's `<tool_call>` come before the JSON ones.
MARKERS = (
    ("<|tool_call>", GEMMA4),
    ("<|channel|>", HARMONY),
    ("<function=", QWEN_XML),
    ("<tool_call>", HERMES),
    ("<|start_header_id|>", LLAMA),
)


def syntax_of(template: str | None) -> Syntax | None:
    """The syntax a chat template teaches; None if it teaches no tool calls that we know."""
    return next((s for marker, s in MARKERS if marker in (template or "")), None)


__all__ = ["SYNTAXES", "CallState", "Syntax", "Thought", "syntax_of"]
