"""Trace of a request: the rounds of its decoding, and where each token of the output came from."""

import collections
import dataclasses
from typing import Any, Literal, NamedTuple

from dflash_jax.engine.state_machine.request_state import (
    CallRetried,
    Cancelled,
    Event,
    Prefilled,
    Stepped,
)
from dflash_jax.engine.state_machine.words import Ids

TokenSource = Literal["drafted", "target", "forced"]
Tops = tuple[Any, Any]  # `TopTokens` of drafter and target, or None
NO_TOPS: Tops = (None, None)


class CallTime(NamedTuple):
    """When the rounds of a call ended, for a request."""

    read: float  # when the call's results were read, in seconds
    left: int = 1  # number of its rounds that were not recorded yet, this one included


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of decoding: a draft-verify round, a plain step, or the prefill of a prompt.

    The last token that a round decides counts as the target's own, as in `Stats`, even if a draft
    proposed it and the output ended there. Tokens that are not part of the output are left out.

    Attributes:
      tokens: output tokens, in order.
      sources: where each came from: "drafted", a draft that the target accepted; "target", its own
        choice; "forced", put there by recovery, or the only token that a grammar allowed.
      proposed: number of drafts that were verified; 0 without drafting.
      accepted: number of them that the target accepted, also after the output's end.
      rejected: drafts from the first that the target did not accept, with `Plan.report_drafts`;
        none if the output ended before.
      copied: whether the drafts were copied from the text, and not the drafter's.
      seconds: since the round before, or since the request was given a row; rounds of one call
        share its time equally.
      texts: text of each token; empty without a tokenizer, and for a token that completes no
        character. Together with those of other rounds it is the output with special tokens.
      rejected_texts: text of each rejected draft, after the tokens before it.
      drafts: the drafts that were verified, with `Plan.report_drafts` or `Plan.report_top`.
      draft_top: the drafter's most probable tokens for each of them, with `Plan.report_top`: arrays
        `ids` and `probs` [drafts, N], by the logits that it chose from. None without drafting.
      target_top: the same of the target [drafts + 1, N], before any logits processing: place i
        follows the first i drafts.
      prefill: whether it is the prefill of a prompt, which `Stats.rounds` does not count.
    """

    tokens: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    proposed: int = 0
    accepted: int = 0
    rejected: tuple[int, ...] = ()
    copied: bool = False
    seconds: float = 0.0
    texts: tuple[str, ...] = ()
    rejected_texts: tuple[str, ...] = ()
    drafts: tuple[int, ...] = ()
    draft_top: Any = dataclasses.field(default=None, compare=False)
    target_top: Any = dataclasses.field(default=None, compare=False)
    prefill: bool = False

    def shortened(self, count: int) -> "RoundTrace":
        """Return the round with its first `count` tokens only."""
        if count >= len(self.tokens):
            return self
        kept = {name: getattr(self, name)[:count] for name in ("tokens", "sources", "texts")}
        return dataclasses.replace(self, **kept, rejected=(), rejected_texts=())


class TraceRecorder:
    """Collects the rounds of one request while it runs.

    Decided tokens may be held, and dropped, before they are emitted (see `controller`). A round is
    returned once no token of it is held.
    """

    def __init__(self) -> None:
        self._rounds: collections.deque[RoundTrace] = collections.deque()  # not returned yet
        self._emitted = 0  # tokens of these that were emitted
        self._end = 0.0  # of the last round, in seconds

    def begin(self, now: float) -> None:
        """Note that the request was given a row."""
        self._end = now

    def record(
        self,
        event: Event,
        new: Ids,
        *,
        retracted: int,
        drafts: Ids,
        time: CallTime,
        copied: bool = False,
        tops: Tops = NO_TOPS,
    ) -> None:
        """Record an event of the state machine.

        Args:
          new: tokens that the event added to the decided ones.
          retracted: number of decided tokens that it dropped before that.
          drafts: that were verified, if the plan reports them.
          copied: whether they were copied from the text.
          tops: most probable tokens, if the plan reports them.
        """
        match event:
            case Cancelled() | CallRetried():
                self._drop(retracted)
            case _ if retracted:  # the end token in whose place a call was probed
                self._restore(retracted, new)
            case Prefilled(token) if new:
                self._add(Stepped((token,)), new, drafts, time, tops)
                self._rounds[-1] = dataclasses.replace(self._rounds[-1], prefill=True)
            case Stepped() if new:
                self._add(event, new, drafts, time, tops, copied=copied)

    def _add(
        self,
        step: Stepped,
        new: Ids,
        drafts: Ids,
        time: CallTime,
        tops: Tops,
        *,
        copied: bool = False,
    ) -> None:
        accepted, own = len(step.tokens) - 1, 0
        for token, decided in zip(new, step.tokens, strict=False):
            if token != decided:
                break
            own += 1
        sources: tuple[TokenSource, ...] = ("drafted",) * min(own, accepted)
        sources += ("target",) * (own - len(sources)) + ("forced",) * (len(new) - own)
        rejected = drafts[accepted:] if len(new) > accepted else ()
        if rejected[:1] == step.tokens[-1:]:  # accepted too: the output ended there
            rejected = ()
        seconds = (time.read - self._end) / time.left
        self._end += seconds
        counts = step.num_drafts, accepted, rejected, copied, seconds
        more = {"drafts": drafts, "draft_top": tops[0], "target_top": tops[1]}
        self._rounds.append(RoundTrace(new, sources, *counts, **more))

    def _drop(self, count: int) -> None:
        """Drop the last tokens, none of which was emitted."""
        while count and self._rounds:  # an interrupted turn may not have recorded all of them
            last = self._rounds.pop()
            kept = max(len(last.tokens) - count, 0)
            count -= len(last.tokens) - kept
            if kept:
                self._rounds.append(last.shortened(kept))
            else:  # its time counts to the next round
                self._end -= last.seconds

    def _restore(self, count: int, end: Ids) -> None:
        """Put the target's own end token in place of the last tokens, which were forced."""
        while len(self._rounds) > 1 and count >= len(self._rounds[-1].tokens):
            count -= len(self._rounds.pop().tokens)
        if not self._rounds:
            return
        last = self._rounds[-1]
        kept = len(last.tokens) - count
        sources: tuple[TokenSource, ...] = (*last.sources[:kept], "target")
        tokens = (*last.tokens[:kept], *end)
        self._rounds[-1] = dataclasses.replace(last, tokens=tokens, sources=sources)

    def discard(self) -> None:
        """Drop all tokens, none of which was emitted: they are decoded again."""
        self._drop(sum(len(traced.tokens) for traced in self._rounds))

    def force(self, place: int) -> None:
        """Note that a grammar allowed no token but one, `place` tokens after the emitted ones."""
        place += self._emitted
        for at, traced in enumerate(self._rounds):
            if place < len(traced.tokens):
                if traced.sources[place] == "target":
                    sources = (*traced.sources[:place], "forced", *traced.sources[place + 1 :])
                    self._rounds[at] = dataclasses.replace(traced, sources=sources)
                return
            place -= len(traced.tokens)

    def emit(self, count: int) -> list[RoundTrace]:
        """Return the rounds of which no token is held after `count` more were emitted."""
        self._emitted += count
        complete = []
        while self._rounds and self._emitted >= len(self._rounds[0].tokens):
            complete.append(self._rounds.popleft())
            self._emitted -= len(complete[-1].tokens)
        return complete

    def finish(self) -> list[RoundTrace]:
        """Return the last round if only some of its tokens were emitted; drop all others."""
        some = self._emitted and self._rounds
        rest = [self._rounds[0].shortened(self._emitted)] if some else []
        self._rounds.clear()
        self._emitted = 0
        return rest
