"""Turn the output of a request into text, and cut it at stop strings."""

import collections
from collections.abc import Callable, Collection, Sequence

from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import syntax_of
from dflash_jax.tool_parsers.incremental import Stops
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool


class Detokenizer:
    """Turns output ids into text, incrementally, and looks for stop strings.

    Text that may become part of a stop string is held back, so that nothing is ever retracted.

    Args:
      stop: stop strings.
      tools: declared tools; stop strings do not apply inside their calls and in markup.
      end_ids: tokens that end the output. They are never text, special or not.
      thinking, lenient, fenced: see `OutputParser`; they have no effect without tools.

    Attributes:
      text: the final text so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        *,
        end_ids: Collection[int] = (),
        thinking: bool = False,
        lenient: bool = True,
        fenced: Callable[[str], bool] | None = None,
    ):
        self._decoder = tokenizer.stream(end_ids) if tokenizer else None
        self._stops = Stops(stop) if stop else None
        self._held = ""  # text that may become part of a stop string
        self._parser: OutputParser | None = None  # None where stop strings apply everywhere
        # Lengths of the texts of the last tokens, with marks and without, and their sums.
        self._lengths: collections.deque[tuple[int, int]] = collections.deque()
        self._marked_length = 0
        self._shown_length = 0
        syntax = syntax_of(tokenizer.teaches) if tokenizer and tools and stop else None
        if tokenizer and syntax:
            self._marked = tokenizer.showing(syntax.markers(calls=True)).stream()
            self._parser = OutputParser(
                syntax, tools, stop=stop, thinking=thinking, lenient=lenient, fenced=fenced
            )
        self.text = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was completed; None before."""
        if self._parser:
            return self._parser.stopped_by
        return self._stops.found if self._stops else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stopped_by is not None

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is now final."""
        if self._decoder is None or self.stopped:
            return ""
        if self._parser is None:
            new = self._decoder.push(ids)
            return self._give(self._stops.push(new) if self._stops else new)
        final = ""
        for token in ids:  # one by one: the parser's text has marks that this one lacks
            if self.stopped:
                break
            marked = self._marked.push([token])
            new = self._decoder.push([token])
            self._parser.push(marked)
            final += self._outside(marked, new, self._parser)
        return final

    def finish(self) -> str:
        """Return the text that was held back, at the end of the output."""
        if self._decoder is None or self.stopped:
            return ""
        new = self._decoder.flush()
        if self._parser is None:
            if self._stops:
                new = self._stops.push(new) + self._stops.flush()
            return self._give(new)
        marked = self._marked.flush()
        self._parser.push(marked)
        self._parser.finish()
        return self._outside(marked, new, self._parser)

    def _outside(self, marked: str, new: str, parser: OutputParser) -> str:
        """Return the text that certainly precedes any stop string.

        Args:
          marked: the new text with the marks of calls, which the parser has read.
          new: the same text without marks.
        """
        self._lengths.append((len(marked), len(new)))
        self._marked_length += len(marked)
        self._shown_length += len(new)
        keep = 0  # length of the text without marks that may become part of a stop string
        while self._lengths:
            token_marked, token_shown = self._lengths[0]
            marked_after = self._marked_length - token_marked
            shown_after = self._shown_length - token_shown
            if marked_after < parser.waiting:  # the parser waits with a part of this token's text
                keep = shown_after + min(parser.waiting - marked_after, token_shown)
                break
            self._marked_length = marked_after
            self._shown_length = shown_after
            self._lengths.popleft()
        pending = self._held + new
        final = pending[: max(len(pending) - keep, 0)]
        self._held = pending[len(final) :]
        return self._give(final)

    def _give(self, text: str) -> str:
        """Add to the final text."""
        self.text += text
        return text
