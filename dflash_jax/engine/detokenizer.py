"""Text of a growing output, cut before the first stop string."""

import collections
from collections.abc import Sequence

from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import syntax_of
from dflash_jax.tool_parsers.stops import Stops
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool


class OutputText:
    """Turns ids into text; holds back what may become a stop string (C3: nothing retracted).

    Args:
      tools: declared tools; in their calls, and in markup, no stop string is looked for.
      thinking, slips: as `OutputParser` has them; asked for with tools only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        slips: bool = True,
    ):
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stops = Stops(stop)
        self._held = ""
        self._parser: OutputParser | None = None
        self._lengths: collections.deque[tuple[int, int]] = collections.deque()  # see `_outside`
        self._marks = self._shown = 0  # their sums
        syntax = syntax_of(tokenizer.teaches) if tokenizer and tools and stop else None
        if tokenizer and syntax:
            self._marked = tokenizer.showing(syntax.markers(calls=True)).stream()
            self._parser = OutputParser(syntax, tools, thinking=thinking, stop=stop, lenient=slips)
        self.text = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was completed."""
        return self._parser.stopped_by if self._parser else self._stops.found

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stopped_by is not None

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain; sets `stopped` when a stop string is complete."""
        if self._decoder is None or self.stopped:
            return ""
        if self._parser is None:
            return self._give(self._stops.push(self._decoder.push(ids)))
        given = ""
        for token in ids:  # one by one: the parser's text has marks that this one lacks
            if not self.stopped:
                marked, new = self._marked.push([token]), self._decoder.push([token])
                self._parser.push(marked)
                given += self._outside(marked, new, self._parser)
        return given

    def finish(self) -> str:
        """What was held back, once no more ids come."""
        if self._decoder is None or self.stopped:
            return ""
        new = self._decoder.flush()
        if self._parser is None:
            given = self._stops.push(new)
            return self._give(given + self._stops.flush())
        marked = self._marked.flush()
        self._parser.push(marked)
        self._parser.finish()
        return self._outside(marked, new, self._parser)

    def _outside(self, marked: str, new: str, parser: OutputParser) -> str:
        """The text of which the parser knows that it stands before any stop string."""
        self._lengths.append((len(marked), len(new)))  # of a token's text, with marks and without
        self._marks, self._shown = self._marks + len(marked), self._shown + len(new)
        left, keep = parser.waiting, 0
        while self._lengths:
            length, shown = self._lengths[0]
            if self._marks - length < left:  # the first token of which something waits
                keep = self._shown - shown + min(left - self._marks + length, shown)
                break
            self._marks, self._shown = self._marks - length, self._shown - shown
            self._lengths.popleft()
        pending = self._held + new
        given = pending[: max(len(pending) - keep, 0)]
        self._held = pending[len(given) :]
        return self._give(given)

    def _give(self, text: str) -> str:
        self.text += text
        return text
