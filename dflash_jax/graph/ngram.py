"""Drafts copied from the text: the continuation of its last occurrence of the last tokens.

They need no parameters and fit every target: `NGram` is a drafter, and `Copying` lets its drafts
precede those of another one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.graph import protocols
from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers


@dataclasses.dataclass(frozen=True)
class NGram:
    """Drafts what followed the latest of the longest matches (a `graph.protocols.Drafter`).

    Its state [B, S] is the text of each row, by position.

    Attributes:
      most, least: tokens at the end of the text that must occur before it; the longest match of
        that many tokens counts.
      block: tokens of a block, the anchor included.
    """

    most: int = 4
    least: int = 2
    block: int = 8
    kind: str = "ngram"
    taps: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the rule."""
        return (
            f"ngram: copies what followed the longest match of {self.least} to {self.most} tokens"
        )

    def empty(self, make: CacheMaker) -> Int[Array, "B S"]:
        """Return empty texts."""
        return jnp.zeros((make.rows, make.slots), jnp.int32)

    def observe(
        self,
        params: Any,
        text: Int[Array, "B S"],
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> Int[Array, "B S"]:
        """Write tokens at their positions."""
        write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        return write(text, tokens, start)

    def propose(
        self,
        params: Any,
        text: Int[Array, "B S"],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, Int[Array, "B S"]]:
        """Draft the tokens after the match; none where there is no match of `least` tokens."""
        full = self.observe(params, text, anchor[:, None], (), start)
        places = jnp.arange(full.shape[1])[None, :]
        length, going = jnp.zeros_like(full), places < start[:, None]
        for i in range(self.most):  # tokens that agree before each place, itself included
            back = jnp.take_along_axis(full, jnp.maximum(start - i, 0)[:, None], axis=1)
            going &= (jnp.roll(full, i, axis=1) == back) & (places >= i)
            length += going.astype(jnp.int32)
        score = jnp.where(length >= self.least, length * full.shape[1] + places, -1)
        at = jnp.argmax(score, axis=1).astype(jnp.int32)  # the latest of the longest
        period = jnp.maximum(start - at, 1)  # a text that ends is taken to begin again at the match
        following = at[:, None] + 1 + jnp.arange(sampler.places)[None, :] % period[:, None]
        tokens = jnp.take_along_axis(full, following, axis=1)
        count = jnp.where(score.max(axis=1) >= 0, sampler.places, 0)
        draft = sampler.certain(tokens, count)
        return dataclasses.replace(draft, copied=count > 0), text

    def take(self, text: Int[Array, "B S"], row: Any, start: Any, length: int) -> Int[Array, " L"]:
        """Return the text of some positions of a row, for the prefix cache."""
        return jax.lax.dynamic_slice(text, (row, start), (1, length))[0]

    def put(self, text: Int[Array, "B S"], row: Any, start: Any, part: Any) -> Int[Array, "B S"]:
        """Put text into a row."""
        return jax.lax.dynamic_update_slice(text, part[None], (row, start))


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
        """Those of the drafter."""
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
        """As the drafter; texts have positions."""
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
        found, finite = copy.num_drafts > 0, jnp.ones(len(anchor), bool)

        def drafted(inner: Any) -> tuple[Any, ...]:
            arguments = (inner, anchor, start, shared, sampler)
            draft, after = protocols.call(self.drafter, params, *arguments, method="propose")
            count = sampler.places if draft.num_drafts is None else draft.num_drafts
            count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), found.shape)
            known = finite if draft.finite is None else draft.finite
            logits = draft.logits
            if sampler.keeps_logits and logits is None:
                logits = sampler.certain(draft.block[:, 1:]).logits
            return draft.block.astype(jnp.int32), count, known, logits, after

        def copied(inner: Any) -> tuple[Any, ...]:
            return copy.block, copy.num_drafts, finite, copy.logits, inner

        # A step without any row that drafts is only timed: it takes the time of the drafter.
        everywhere = (found | sampler.idle).all() & ~sampler.idle.all()
        block, count, finite, logits, inner = jax.lax.cond(everywhere, copied, drafted, inner)
        block = jnp.where(found[:, None], copy.block, block)
        count = jnp.where(found, copy.num_drafts, count)
        if logits is not None and copy.logits is not None:
            logits = jnp.where(found[:, None, None], copy.logits, logits)
        return Draft(block, found | finite, count, found, logits), (inner, text)

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
