"""The vocabulary of a model as the recovery rules of one request need it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dflash_jax.tool_parsers.calls import Content, Event, calls_of
from dflash_jax.tool_parsers.malformed_calls import are_valid_arguments
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import Syntax
from dflash_jax.tool_parsers.tool_schema import AUTO, Tool, ToolChoice

Ids = tuple[int, ...]
BLANK = " \t\r\n\v\f\N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{ZERO WIDTH NO-BREAK SPACE}"


@dataclasses.dataclass(frozen=True)
class Words:
    """Token ids and texts that the recovery rules look for; all empty without a tokenizer."""

    text: Callable[[Ids], str] = lambda ids: ""  # of ids, special tokens included
    syntax: Syntax | None = None
    tools: tuple[Tool, ...] = ()  # declared tools
    hidden: frozenset[int] = frozenset()  # special tokens other than those around thoughts
    # For each tool that may be called, the ids with which a forced call begins, up to its
    # arguments. Empty if no call may be forced.
    calls: tuple[Ids, ...] = ()
    # Ids with which all of `calls` begin: the lead that the family writes before a call, and the
    # marker that only calls have. Empty if unknown.
    opening: Ids = ()
    lead: int = 1  # number of them that are forced at once; of those after them each is judged
    marker: int = -1  # the special tokens around a call; -1 where they are no single tokens
    closer: int = -1
    # With which an opening marker of several tokens can end; empty where it is a single token, or
    # not at the beginning of a call.
    call_begins: frozenset[int] = frozenset()
    choice: ToolChoice = AUTO
    close: Ids = ()  # ids that close a thought
    colons: frozenset[int] = frozenset()  # ids that end a preamble, for the detector by ids
    inside_thought: bool = False  # the prompt ended inside an open thought
    call_ends: frozenset[int] | None = None  # with which a call's closing marker can end

    def is_visible(self, ids: Iterable[int]) -> bool:
        """Return whether any of these ids is visible to a caller; pass them without end tokens."""
        return any(i not in self.hidden for i in ids)

    def thinking(self, ids: Ids) -> bool:
        """Return whether the output so far ends inside a thought."""
        thought = self.syntax.thought if self.syntax else None
        return bool(thought) and thought.is_open(self.text(ids), inside=self.inside_thought)

    def _are_valid(self, events: Iterable[Event]) -> bool:
        """Return whether all calls among events have valid arguments."""
        declared = {tool.name: tool for tool in self.tools}
        return all(are_valid_arguments(declared.get(x), text) for x, text, _ in calls_of(events))

    def read(self, ids: Ids, *, before: str = "") -> "ParsedOutput":
        """Parse the output so far as its caller would if it ended here.

        Args:
          before: text before the ids.
        """
        parser = OutputParser(self.syntax, self.tools, thinking=self.inside_thought)
        events = [*parser.push(text := before + self.text(ids)), *parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Content))
        if not text:  # no tokenizer, or tokens that are no text
            content = "?" if self.is_visible(ids) and self.syntax is None else ""
        answered = bool(content.strip(BLANK)) and self.is_visible(ids)
        unparsed = parser.unfinished or parser.unreadable > 0 or parser.empty_calls > 0
        broken = unparsed or not self._are_valid(events)
        began = parser.calls > 0 or parser.unfinished
        return ParsedOutput(parser.calls > 0, began, broken, answered)


class ParsedOutput(NamedTuple):
    """An output as its caller parses it, in any supported syntax."""

    called: bool  # it calls a tool; an undeclared one counts, as the caller can answer the call
    began: bool  # it calls a tool, or ends inside a call
    broken: bool  # it ends inside a call, or contains one that is empty, cannot be parsed, or whose
    # arguments are no object with the tool's required keys
    answered: bool  # it has content that is neither a thought nor blank


NO_WORDS = Words()


# Let the target choose the tool of a forced call among the declared ones.
#
# The beginning of a call is known for each declared tool (`Words.calls`). The ids that all of them
# share are forced. Where they differ, the device decides one token and stops, by the row's limit,
# and `RowRules.choices` makes it report the best token that continues any of them. So the name
# depends neither on drafting nor on the block size, and is always a declared one.


def split_names(calls: Sequence[Ids]) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the ids that all call beginnings share, and the rest of each.

    The rest is empty if nothing remains to be chosen: one beginning is left, or one is complete.
    """
    calls = list(dict.fromkeys(calls))
    if len(calls) < 2:
        return (calls[0] if calls else ()), ()
    shared = 0
    while len({ids[shared : shared + 1] for ids in calls}) == 1 and len(calls[0]) > shared:
        shared += 1
    rest = tuple(ids[shared:] for ids in calls)
    return calls[0][:shared], rest if all(rest) else ()


def calls_after(calls: Sequence[Ids], token: int) -> tuple[Ids, ...]:
    """Return the rest of the beginnings that continue with a token, after it."""
    return tuple(ids[1:] for ids in calls if ids[0] == token)
