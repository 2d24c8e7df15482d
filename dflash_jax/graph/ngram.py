"""Drafts copied from the text, for every target: what followed its last tokens before."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers


@dataclasses.dataclass(frozen=True)
class NGram:
    """Drafts what followed the latest of the longest matches. Its state is each row's text [B, S].

    Attributes:
      most, least: tokens at the text's end that must occur before it, the more the better.
      block: tokens of a block, the anchor included.
    """

    most: int = 4
    least: int = 2
    block: int = 8
    kind: str = "ngram"
    taps: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the rule."""
        return f"ngram: copies what followed {self.least} to {self.most} equal tokens"

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
        positions = jnp.arange(full.shape[1])[None, :]
        length = jnp.zeros_like(full)
        going = positions < start[:, None]
        for i in range(self.most):  # tokens that agree before each position, itself included
            back = jnp.take_along_axis(full, jnp.maximum(start - i, 0)[:, None], axis=1)
            going &= (jnp.roll(full, i, axis=1) == back) & (positions >= i)
            length += going.astype(jnp.int32)
        score = jnp.where(length >= self.least, length * full.shape[1] + positions, -1)
        at = jnp.argmax(score, axis=1).astype(jnp.int32)  # the latest of the longest
        period = jnp.maximum(start - at, 1)  # a text that ends is taken to begin again at the match
        following = at[:, None] + 1 + jnp.arange(sampler.num_drafts)[None, :] % period[:, None]
        tokens = jnp.take_along_axis(full, following, axis=1)
        count = jnp.where(score.max(axis=1) >= 0, sampler.num_drafts, 0)
        return dataclasses.replace(sampler.certain(tokens, count), copied=count > 0), text

    def take(self, text: Int[Array, "B S"], row: Any, start: Any, length: int) -> Int[Array, " L"]:
        """Return the text of some positions of a row, for the prefix cache."""
        return jax.lax.dynamic_slice(text, (row, start), (1, length))[0]

    def put(self, text: Int[Array, "B S"], row: Any, start: Any, part: Any) -> Int[Array, "B S"]:
        """Put text into a row."""
        return jax.lax.dynamic_update_slice(text, part[None], (row, start))
