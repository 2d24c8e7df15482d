"""Turn the output of a request into text, and cut it at stop strings."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Sequence

from dflash_jax.engine.request import Request
from dflash_jax.engine.result import Piece, TokenLogprob
from dflash_jax.engine.state_machine.trace import RoundTrace, TraceRecorder
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.engine.vocabulary import opens_thought
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import syntax_of
from dflash_jax.tool_parsers.incremental import Stops
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool

CONTEXT = 4  # tokens before a rejected draft that its text may depend on


class Detokenizer:
    """Turns output ids into text, incrementally, and looks for stop strings.

    Text that may become part of a stop string is held back, so that nothing is ever retracted.

    Args:
      tools: declared tools; stop strings do not apply inside their calls and in markup.
      end_ids: tokens that end the output. They are never text, special or not.
      thinking, lenient: see `OutputParser`; used with tools only.
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
    ):
        self._decoder = tokenizer.stream() if tokenizer else None
        self._end_ids = end_ids
        self._stops = Stops(stop) if stop else None
        self._held = ""
        self._parser: OutputParser | None = None
        self._lengths: collections.deque[tuple[int, int]] = collections.deque()  # see `_outside`
        self._marks = self._shown = 0  # their sums
        syntax = syntax_of(tokenizer.teaches) if tokenizer and tools and stop else None
        if tokenizer and syntax:
            self._marked = tokenizer.showing(syntax.markers(calls=True)).stream()
            modes = {"thinking": thinking, "lenient": lenient}
            self._parser = OutputParser(syntax, tools, stop=stop, **modes)
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
            new = self._decoder.push(self._without_end(ids))
            return self._give(self._stops.push(new) if self._stops else new)
        given = ""
        for token in ids:  # one by one: the parser's text has marks that this one lacks
            if not self.stopped:
                marked = self._marked.push([token])  # the end of a call may end the output
                new = self._decoder.push(self._without_end([token]))
                self._parser.push(marked)
                given += self._outside(marked, new, self._parser)
        return given

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self._end_ids else ids

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
        """Return the text that certainly precedes any stop string."""
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


class _RoundTexts:
    """Adds the texts of tokens to the rounds of one request, in their order."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer.showing(["".join(tokenizer.special_texts)])
        self._stream = self._tokenizer.stream()
        self._last: tuple[int, ...] = ()

    def add(self, traced: RoundTrace) -> RoundTrace:
        """Return a round with the texts of its tokens and its rejected drafts."""
        before = (*self._last, *traced.tokens[: traced.accepted])[-CONTEXT:]
        self._last = (*self._last, *traced.tokens)[-CONTEXT:]
        texts = tuple(self._stream.push([token]) for token in traced.tokens)
        if not traced.rejected:
            return dataclasses.replace(traced, texts=texts)
        others = self._tokenizer.stream()
        others.push(before)
        rejected_texts = tuple(others.push([token]) for token in traced.rejected)
        return dataclasses.replace(traced, texts=texts, rejected_texts=rejected_texts)


class OutputBuffer:
    """Everything a request's caller was given so far. Nothing in it is ever taken back."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, grammar: Grammar | None):
        self.ids: list[int] = []  # without a stop string and what follows it
        self.pieces: list[Piece] = []  # the same, in the portions in which they were emitted
        self.logprobs: list[TokenLogprob] = []  # of these, where the request asks for them
        self.grammar = grammar  # advances with the emitted tokens
        stop, tools = request.params.stop or (), request.tools
        self._stops, self._has_text = bool(stop), tokenizer is not None
        thinking = tokenizer and stop and tools and opens_thought(tokenizer, request.prompt)
        modes = {"thinking": bool(thinking), "lenient": request.params.structured is None}
        self._detokenizer = Detokenizer(tokenizer, stop, tools, end_ids=request.stop_ids, **modes)
        self.trace = TraceRecorder() if request.params.trace else None  # of decided tokens
        self._texts = _RoundTexts(tokenizer) if tokenizer and request.params.trace else None
        self._pending: list[TokenLogprob] = []  # log-probabilities of tokens not emitted yet
        self._of_end: Sequence[TokenLogprob] = ()  # of an end token in whose place a call is probed

    @property
    def ended(self) -> bool:
        """Whether a stop string was completed, or the grammar allows nothing more."""
        return self._detokenizer.stopped or (self.grammar is not None and self.grammar.finished)

    @property
    def text(self) -> str | None:
        """The text so far; None without a tokenizer."""
        return self._detokenizer.text if self._has_text else None

    def emit(self, ids: tuple[int, ...]) -> None:
        """Give ids to the caller, up to where the output ends."""
        text, used = "", 0
        if not self._stops and self.grammar is None:  # nothing can end the output in between
            text, used = self._detokenizer.push(ids), len(ids)
        while used < len(ids) and not self.ended:
            text += self._detokenizer.push(ids[used : used + 1])
            if self.grammar:
                if self.trace and self.grammar.leaves_no_choice():
                    self.trace.force(used)
                self.grammar.accept(ids[used : used + 1])
            used += 1
        logprobs, self._pending = tuple(self._pending[:used]), self._pending[len(ids) :]
        rounds = self._with_texts(self.trace.emit(used)) if self.trace else ()
        self.pieces.append(Piece(ids[:used], text, logprobs, rounds))
        self.logprobs += logprobs
        self.ids += ids[:used]  # last: an interrupted call is recognised by missing ids

    def finish(self) -> None:
        """Give the caller the text that was held back."""
        rest = self._detokenizer.finish()
        rounds = self._with_texts(self.trace.finish()) if self.trace else ()
        if rest or rounds:
            self.pieces.append(Piece((), rest, (), rounds))

    def _with_texts(self, rounds: Sequence[RoundTrace]) -> tuple[RoundTrace, ...]:
        return tuple(map(self._texts.add, rounds) if self._texts else rounds)

    def add_logprobs(
        self,
        ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprob],
        *,
        retracted: int,
        probes: bool,
    ) -> None:
        """Keep log-probabilities of newly decided ids; forced ids have none.

        Args:
          retracted: number of ids that are dropped; the end token in their place comes back.
          probes: whether they are in place of an end token, whose log-probability is the last.
        """
        if retracted:
            del self._pending[-retracted:]
            logprobs = self._of_end
        elif probes and ids:
            self._of_end = logprobs[-1:]
        self._pending += [
            found if found and found.token_id == i else TokenLogprob(i, None, ())
            for i, found in itertools.zip_longest(ids, logprobs[: len(ids)])
        ]

    def discard_pending(self) -> None:
        """Drop log-probabilities and rounds of tokens that will be decoded again."""
        self._pending.clear()
        if self.trace:
            self.trace.discard()
