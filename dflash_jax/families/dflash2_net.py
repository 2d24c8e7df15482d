"""The DFlash 2 drafter: v1 with dynamic convolutions in every layer, and a candidate selector.

The selector rescores each position's best tokens given the token before, from left to right
(formulas as in the `dflash` 0.1.0 reference; own implementation).
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.families.dflash2 import DFlash2Config
from dflash_jax.families.dflash_net import Attend, DFlash, DrafterAttention, Kept
from dflash_jax.graph.protocols import Draft, DraftSampler, SharedLayers
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.vocabulary import all_finite, top_k
from dflash_jax.nn.attention import Positions
from dflash_jax.nn.layers import GatedMLP, declare, dot, norm_weight, product, rms_norm, weight
from dflash_jax.nn.objective import (
    Places,
    Scores,
    cross_entropy,
    distance,
    own_vocabulary,
    scores_of,
)


class DynamicConvolution(nn.Module):
    """A causal convolution along the block, whose kernels depend on the input, per group.

    It is applied before and after a sublayer (sides 0 and 1), with kernels from the same input.
    The block is padded with zeros, and the convolution is initialised as the identity.
    """

    config: DFlash2Config

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        groups = c.hidden_size // c.conv_group_size

        def identity(_: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
            return jnp.zeros(shape, dtype).at[:, 0].set(1)

        shape = (2, c.conv_kernel_size, c.hidden_size)
        self.base = declare(self, "base", identity, shape)
        self.kernel = weight(self, "kernel", (c.hidden_size, 2 * c.conv_kernel_size * groups), 0.0)

    def dynamic(self, x: Float[Array, "B T D"]) -> Float[Array, "B T 2 taps groups"]:
        """Return the dynamic kernels of both sides at every position."""
        c = self.config
        return dot(x, self.kernel).reshape(*x.shape[:2], 2, c.conv_kernel_size, -1)

    def __call__(
        self, z: Float[Array, "B T D"], kernels: Float[Array, "B T 2 taps groups"], side: int
    ) -> Float[Array, "B T D"]:
        """y[t] = sum over taps o of (base[o] + kernels[t, o]) · z[t - o]; side 0 is before."""
        c = self.config
        out = jnp.zeros_like(z)
        for tap in range(c.conv_kernel_size):
            back = jnp.pad(z, ((0, 0), (tap, 0), (0, 0)))[:, : z.shape[1]]
            grouped = back.reshape(*z.shape[:2], -1, c.conv_group_size)
            out += self.base[side, tap].astype(z.dtype)[None, None] * back
            out += (kernels[:, :, side, tap, :, None] * grouped).reshape(z.shape)
        return out


class ConvolvedLayer(nn.Module):
    """A drafter's layer with convolutions before and after both sublayers."""

    config: DFlash2Config
    window: int | None
    causal: bool
    kernels: str = "xla"

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        self.input_norm = norm_weight(self, "input_norm", c.hidden_size)
        self.attention_conv = DynamicConvolution(c)
        self.attention = DrafterAttention(c, self.window, self.causal, self.kernels)
        self.post_attention_norm = norm_weight(self, "post_attention_norm", c.hidden_size)
        self.mlp_conv = DynamicConvolution(c)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Positions
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        return self.around(x, lambda h: self.attention(h, cache, positions))

    def around(
        self, x: Float[Array, "B T D"], attend: Attend[Kept]
    ) -> tuple[Float[Array, "B T D"], Kept]:
        """As in `DrafterLayer`, with inputs and outputs of attention and MLP convolved."""
        eps = self.config.rms_norm_eps
        conv = self.attention_conv
        with jax.named_scope("attention"):
            h = rms_norm(x, self.input_norm, eps, self.kernels)
            kernels = conv.dynamic(h)
            h, kept = attend(conv(h, kernels, 0))
            x = x + conv(h, kernels, 1)
        conv = self.mlp_conv
        with jax.named_scope("mlp"):
            h = rms_norm(x, self.post_attention_norm, eps, self.kernels)
            kernels = conv.dynamic(h)
            return x + conv(self.mlp(conv(h, kernels, 0)), kernels, 1), kept


class DFlash2(DFlash):
    """The v1 drafter with convolved layers and a selector; contexts are not convolved."""

    config: DFlash2Config  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)
    layer: Callable[..., Any] = ConvolvedLayer

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        c = self.config
        self.hidden = weight(self, "selector_hidden", (c.hidden_size, c.selector_rank))
        self.predecessor = weight(self, "predecessor", (c.vocab_size, c.selector_rank))
        self.successor = weight(self, "successor", (c.vocab_size, c.selector_rank))

    def propose(
        self,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Draft along the selector's path."""
        hidden, logits, caches = self.predict(
            caches, anchor, start, shared, sampler.num_drafts, sampler.idle
        )
        finite = all_finite(logits, self.kernels).all(axis=1)
        with jax.named_scope("selector"):
            unary, index = top_k(logits, self.config.selector_top_k)
            ids = self.token(index)
            pairs = self.pair_scores(hidden, unary, ids, anchor)
            at = jnp.zeros_like(start)
            path = []
            told = []
            for i in range(ids.shape[1]):
                scores = jnp.take_along_axis(pairs[:, i], at[:, None, None], axis=1)[:, 0]
                choice = sampler.sample_one(scores, i, ids[:, i])
                at = choice.index
                finite = finite & choice.finite
                path.append(at)
                told.append(scores)
            chosen = jnp.stack(path, axis=1)[:, :, None]
            tokens = jnp.take_along_axis(ids, chosen, axis=2)[:, :, 0]
        along = jnp.stack(told, axis=1) if sampler.keeps_logits else None
        return sampler.draft(tokens, finite, logits=along, ids=ids), caches

    def pair_scores(
        self,
        hidden: Float[Array, "B R D"],
        unary: Float[Array, "B R C"],
        ids: Int[Array, "B R C"],
        anchor: Int[Array, " B"],
    ) -> Float[Array, "B R C C"]:
        """Return the score of each candidate (last axis) after each one before it, float32.

        Before the first position, every candidate is the anchor.
        """
        first = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, ids.shape[2]))
        return self.scores(hidden, unary, ids, jnp.concatenate([first, ids[:, :-1]], axis=1))

    def scores(
        self,
        hidden: Float[Array, "B R D"],
        unary: Float[Array, "B R C"],
        ids: Int[Array, "B R C"],
        before: Int[Array, "B R P"],
    ) -> Float[Array, "B R P C"]:
        """Return the score of each candidate after each of P preceding tokens, float32."""
        query = self.predecessor[before] * dot(hidden, self.hidden)[:, :, None]  # [B, R, P, r]
        scores = product("brpk,brck->brpc", query, self.successor[ids])
        return unary[:, :, None] + scores

    def objective(self, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
        """Score drafts by the selector, which learns to choose the label after the true token.

        Places whose label is not a candidate do not count for the selector.
        """
        logits, p, labels, known = own_vocabulary(self, places, plain, p)
        nll = cross_entropy(logits, labels)
        unary, index = jax.lax.top_k(logits, self.config.selector_top_k)
        ids = self.token(index)
        scores = self.scores(places.hidden, unary, ids, places.previous[:, :, None])[:, :, 0]
        hit = ids == places.labels[:, :, None]
        best = jnp.take_along_axis(ids, jnp.argmax(scores, axis=-1)[:, :, None], axis=-1)[:, :, 0]
        label_score = jnp.where(hit, scores, 0.0).sum(axis=-1)
        return scores_of(
            known,
            loss=distance(loss, logits, nll, p),
            nll=nll,
            right=best == places.labels,
            head=jax.nn.logsumexp(scores, axis=-1) - label_score,
            head_counts=hit.any(axis=-1),
        )


def build(config: DFlash2Config) -> DFlash2:
    """Return the drafter module of a config."""
    return DFlash2(config)
