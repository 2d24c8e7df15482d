"""What the rules have to know of a model's words, settled once per request."""

import dataclasses
from collections.abc import Callable, Iterable

from dflash_jax.tools.declared import Tool
from dflash_jax.tools.stream import OutputParser
from dflash_jax.tools.syntax import Syntax

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Words:
    """The vocabulary as the rules see it; without a tokenizer all texts are empty.

    Attributes:
      text: raw text of ids, special tokens written out.
      tools: the declared ones.
      hidden: ids a caller never sees: special tokens but for those around thoughts.
      calls: how a forced tool call may begin, for each tool that may be called: the ids up to its
        arguments. Empty where no call may be forced.
      close: what ends a thought that has to end.
      skip: ids of the phrase behind which an output is not stalled.
      colons: ids that end a preamble, for the detector by ids.
      inside_thought: whether the prompt ended inside an open thought.
      call_ends: ids with which a tool call's closing marker can end; None if that is not known.
    """

    text: Callable[[Ids], str] = lambda ids: ""
    syntax: Syntax | None = None
    tools: tuple[Tool, ...] = ()
    hidden: frozenset[int] = frozenset()
    calls: tuple[Ids, ...] = ()
    close: Ids = ()
    skip: Ids = ()
    colons: frozenset[int] = frozenset()
    inside_thought: bool = False
    call_ends: frozenset[int] | None = None

    def is_visible(self, ids: Iterable[int]) -> bool:
        """Whether a caller sees anything of these ids; end tokens are for others to leave out."""
        return any(i not in self.hidden for i in ids)

    def thinking(self, ids: Ids) -> bool:
        """Whether the output so far ends inside a thought."""
        thought = self.syntax.thought if self.syntax else None
        if thought is None:
            return False
        return thought.is_open(self.text(ids), inside=self.inside_thought)

    def has_called(self, ids: Ids) -> bool:
        """Whether the output so far began a tool call, in its family's form or another's.

        A call of an undeclared tool counts: the caller receives it and answers it.
        """
        parser = OutputParser(self.syntax, self.tools, thinking=self.inside_thought)
        parser.push(self.text(ids))
        parser.finish()
        return parser.calls > 0 or parser.unfinished


SILENT = Words()
