"""Drafts copied from the text before those of another drafter, where enough tokens match."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.graph import protocols
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers


@dataclasses.dataclass(frozen=True)
class Copying:
    """A drafter whose drafts are copied from the text in rows where that has a long enough match.

    Where all rows that draft have one, the drafter does not run. Its state is that of the drafter
    and of the rule.

    Attributes:
      drafter: runs in other rows.
      rule: says what is copied; `least` is the length of a match.
    """

    drafter: Any
    rule: NGram

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of the drafter."""
        return self.drafter.taps

    def empty(self, make: CacheMaker) -> tuple[Any, Int[Array, "B S"]]:
        """Return the empty states."""
        return self.drafter.empty(make), self.rule.empty(make)

    def observe(
        self,
        params: Any,
        state: tuple[Any, Int[Array, "B S"]],
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> tuple[Any, Int[Array, "B S"]]:
        """Let both observe the tokens."""
        inner, text = state
        inner = protocols.call(self.drafter, params, inner, tokens, taps, start, method="observe")
        return inner, self.rule.observe({}, text, tokens, taps, start)

    def commit(
        self, state: tuple[Any, Int[Array, "B S"]], num_committed: Int[Array, " B"]
    ) -> tuple[Any, Int[Array, "B S"]]:
        """Commit the state of the drafter; texts have positions, and need no commit."""
        inner, text = state
        return protocols.commit(self.drafter, inner, num_committed), text

    def propose(
        self,
        params: Any,
        state: tuple[Any, Int[Array, "B S"]],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[Any, Int[Array, "B S"]]]:
        """Draft copies where there is a match, and what the drafter proposes elsewhere."""
        inner, text = state
        copy, text = self.rule.propose({}, text, anchor, start, shared, sampler)
        assert copy.num_drafts is not None
        has_copy = copy.num_drafts > 0
        finite = jnp.ones(len(anchor), bool)

        def drafted(inner: Any) -> tuple[Any, ...]:
            arguments = (inner, anchor, start, shared, sampler)
            draft, after = protocols.call(self.drafter, params, *arguments, method="propose")
            count = sampler.num_drafts if draft.num_drafts is None else draft.num_drafts
            count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), has_copy.shape)
            known = finite if draft.finite is None else draft.finite
            logits = draft.logits
            if sampler.keeps_logits and logits is None:
                logits = sampler.certain(draft.block[:, 1:]).logits
            return draft.block.astype(jnp.int32), count, known, logits, after

        def copied(inner: Any) -> tuple[Any, ...]:
            return copy.block, copy.num_drafts, finite, copy.logits, inner

        # A step without any row that drafts is only timed: it takes the time of the drafter.
        everywhere = (has_copy | sampler.idle).all() & ~sampler.idle.all()
        block, count, finite, logits, inner = jax.lax.cond(everywhere, copied, drafted, inner)
        block = jnp.where(has_copy[:, None], copy.block, block)
        count = jnp.where(has_copy, copy.num_drafts, count)
        if logits is not None and copy.logits is not None:
            logits = jnp.where(has_copy[:, None, None], copy.logits, logits)
        return Draft(block, has_copy | finite, count, has_copy, logits), (inner, text)

    def take(self, state: Any, row: Any, start: Any, length: int) -> tuple[Any, Any]:
        """Return the parts of both states for some positions of a row, for the prefix cache."""
        inner, text = state
        part = protocols.take(self.drafter, inner, row, start, length)
        return part, self.rule.take(text, row, start, length)

    def put(self, state: Any, row: Any, start: Any, part: Any) -> tuple[Any, Any]:
        """Put parts of both states into a row."""
        inner = protocols.put(self.drafter, state[0], row, start, part[0])
        return inner, self.rule.put(state[1], row, start, part[1])


def with_copies(drafter: Any, length: int) -> Any:
    """Return a drafter that copies from the text after matches of so many tokens; 0 for never."""
    if not length or drafter is None or isinstance(drafter, NGram):
        return drafter
    return Copying(drafter, NGram(most=max(length, NGram.most), least=length))
