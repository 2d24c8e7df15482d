"""Trace of a request: the rounds of its decoding, and where each token of the output came from."""

import collections
import dataclasses
from typing import Any, Literal, NamedTuple

from dflash_jax.engine.state_machine.output_vocabulary import Ids
from dflash_jax.engine.state_machine.request_state import (
    CallRetried,
    Cancelled,
    Event,
    Prefilled,
    Stepped,
)

TokenSource = Literal["drafted", "target", "forced"]
Tops = tuple[Any, Any]  # `TopTokens` of drafter and target, or None
NO_TOPS: Tops = (None, None)


class CallTime(NamedTuple):
    """The time at which a device call ended, to be shared by its rounds."""

    read: float  # when the call's results were read, in seconds
    left: int = 1  # number of the call's rounds that were not recorded yet, this one included


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of decoding: a draft-verify round, a plain step, or the prefill of a prompt.

    The last token that a round decides counts as the target's own, as in `Stats`, even if a draft
    proposed it and the output ended there. Tokens that are not part of the output are left out.

    Attributes:
      tokens: output tokens, in order.
      sources: the source of each token: "drafted", a draft that the target accepted; "target", the
        target's own choice; "forced", put there by recovery, or the only token that a grammar
        allowed.
      proposed: number of drafts that were verified; 0 without drafting.
      accepted: number of drafts that the target accepted, those after the output's end included.
      rejected: drafts from the first that the target did not accept, with `Plan.report_drafts`;
        none if the output ended before it.
      copied: whether the n-gram drafter copied the drafts from earlier text.
      seconds: time since the round before, or since the request was given a row; rounds of one call
        share its time equally.
      texts: text of each token; empty without a tokenizer, and for a token that completes no
        character. The texts of all rounds together are the output with special tokens.
      rejected_texts: text of each rejected draft, after the tokens before it.
      drafts: the drafts that were verified, with `Plan.report_drafts` or `Plan.report_top`.
      draft_top: the drafter's most probable tokens for each draft, with `Plan.report_top`: arrays
        `ids` and `probs` [drafts, N], by the logits that it chose from. None without drafting.
      target_top: the target's most probable tokens, with `Plan.report_top`: arrays as in
        `draft_top`, [drafts + 1, N], before any logits processing. Position i follows the first i
        drafts.
      prefill: whether the round is the prefill of a prompt, which `Stats.rounds` does not count.
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
        return dataclasses.replace(
            self,
            tokens=self.tokens[:count],
            sources=self.sources[:count],
            texts=self.texts[:count],
            rejected=(),
            rejected_texts=(),
        )


class TraceRecorder:
    """Collects the rounds of one request while it runs.

    Decided tokens may be held, and dropped, before they are emitted (see `controller`). A round is
    returned once no token of it is held.
    """

    def __init__(self) -> None:
        self._rounds: collections.deque[RoundTrace] = collections.deque()  # not returned yet
        self._emitted = 0  # number of tokens of these rounds that were emitted
        self._end = 0.0  # time at which the last round ended, in seconds

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
          retracted: number of decided tokens that the event dropped before it added any.
          drafts: the drafts that were verified, if the plan reports them.
          copied: whether the drafts were copied from earlier text.
          tops: the most probable tokens, if the plan reports them.
        """
        match event:
            case Cancelled() | CallRetried():
                self._drop(retracted)
            case _ if retracted:  # a probe ended with the end token that it had replaced
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
        accepted = len(step.tokens) - 1
        own = 0
        for token, decided in zip(new, step.tokens, strict=False):
            if token != decided:
                break
            own += 1
        sources: tuple[TokenSource, ...] = ("drafted",) * min(own, accepted)
        sources += ("target",) * (own - len(sources)) + ("forced",) * (len(new) - own)
        rejected = drafts[accepted:] if len(new) > accepted else ()
        if rejected[:1] == step.tokens[-1:]:  # the draft was accepted too, and the output ended
            rejected = ()
        seconds = (time.read - self._end) / time.left
        self._end += seconds
        draft_top, target_top = tops
        traced = RoundTrace(
            tokens=new,
            sources=sources,
            proposed=step.num_drafts,
            accepted=accepted,
            rejected=rejected,
            copied=copied,
            seconds=seconds,
            drafts=drafts,
            draft_top=draft_top,
            target_top=target_top,
        )
        self._rounds.append(traced)

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
        """Replace the last tokens, which were forced, by the target's own end token."""
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

    def force(self, index: int) -> None:
        """Note that a grammar allowed no token but one, `index` tokens after the emitted ones."""
        index += self._emitted
        for i, traced in enumerate(self._rounds):
            if index < len(traced.tokens):
                if traced.sources[index] == "target":
                    sources = (*traced.sources[:index], "forced", *traced.sources[index + 1 :])
                    self._rounds[i] = dataclasses.replace(traced, sources=sources)
                return
            index -= len(traced.tokens)

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
        rest = []
        if self._emitted and self._rounds:
            rest.append(self._rounds[0].shortened(self._emitted))
        self._rounds.clear()
        self._emitted = 0
        return rest
