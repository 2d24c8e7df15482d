"""The vocabulary of a model as the recovery rules of one request need it."""

import dataclasses
from collections.abc import Callable, Iterable

from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import AUTO, Tool, ToolChoice

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OutputVocabulary:
    """Token ids and texts that the recovery rules look for; all empty without a tokenizer."""

    text: Callable[[Ids], str] = lambda ids: ""  # decodes ids, special tokens included
    syntax: Syntax | None = None  # of the family's tool calls and thoughts
    tools: tuple[Tool, ...] = ()  # declared tools
    hidden: frozenset[int] = frozenset()  # special tokens other than those around thoughts
    # For each tool that may be called, the ids with which a forced call begins, up to its
    # arguments. Empty if no call may be forced.
    calls: tuple[Ids, ...] = ()
    # Ids with which all of `calls` begin: the lead that the family writes before a call, and the
    # marker that only calls have. Empty if unknown.
    opening: Ids = ()
    # Number of ids of `opening` that are forced at once. Each id after these is judged by itself.
    lead: int = 1
    # Special tokens that open and close a call; -1 where a marker is no single token.
    marker: int = -1
    closer: int = -1
    # Ids with which an opening marker of several tokens can end. Empty where the marker is a single
    # token, or does not begin a call.
    call_begins: frozenset[int] = frozenset()
    choice: ToolChoice = AUTO  # which of the tools the model may call
    # Whether a code fence may hold calls after a text; None where it never does.
    fenced: Callable[[str], bool] | None = None
    close: Ids = ()  # ids that close a thought
    inside_thought: bool = False  # the prompt ended inside an open thought
    # Ids with which a call's closing marker can end; None where they are not known.
    call_ends: frozenset[int] | None = None

    def is_visible(self, ids: Iterable[int]) -> bool:
        """Return whether any of these ids is visible to a caller; pass them without end tokens."""
        return any(i not in self.hidden for i in ids)


NO_VOCABULARY = OutputVocabulary()
