"""What the rules have to know of a model's words, settled once per request."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dflash_jax.tool_parsers.events import Content
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import AUTO, Tool, ToolChoice

Ids = tuple[int, ...]
BLANK = " \t\r\n\v\f\N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{ZERO WIDTH NO-BREAK SPACE}"


@dataclasses.dataclass(frozen=True)
class Words:
    """The vocabulary as the rules see it; without a tokenizer all texts are empty.

    Attributes:
      text: raw text of ids, special tokens written out.
      tools: the declared ones.
      hidden: ids a caller never sees: special tokens but for those around thoughts.
      calls: how a forced tool call may begin, for each tool that may be called: the ids up to its
        arguments. Empty where no call may be forced.
      opening: ids that lead to a call as the family writes it, up to the first that only a call
        has. All of `calls` begin with them; empty where that is not known.
      marker, closer: the special tokens around a call; -1 where they are no single tokens.
      choice: which tools may be called.
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
    opening: Ids = ()
    marker: int = -1
    closer: int = -1
    choice: ToolChoice = AUTO
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

    def read(self, ids: Ids) -> "Reading":
        """Return what a caller makes of the output so far, if it ends here."""
        parser = OutputParser(self.syntax, self.tools, thinking=self.inside_thought)
        events = [*parser.push(text := self.text(ids)), *parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Content))
        if not text:  # no tokenizer, or tokens that are no text
            content = "?" if self.is_visible(ids) and self.syntax is None else ""
        answered = bool(content.strip(BLANK)) and self.is_visible(ids)
        broken = parser.unfinished or parser.unreadable > 0 or parser.empty_calls > 0
        return Reading(parser.calls > 0, parser.unfinished, broken, answered)

    def has_called(self, ids: Ids) -> bool:
        """Whether the output so far began a tool call, in its family's form or another's.

        A call of an undeclared tool counts: the caller receives it and answers it.
        """
        reading = self.read(ids)
        return reading.called or reading.unfinished


class Reading(NamedTuple):
    """What a caller makes of an output.

    Attributes:
      called: it calls a tool.
      unfinished: it ends inside a call.
      broken: it does, or holds a call that cannot be read or says nothing.
      answered: it has content that is neither a thought nor blank.
    """

    called: bool
    unfinished: bool
    broken: bool
    answered: bool


SILENT = Words()
