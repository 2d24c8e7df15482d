"""The DFlash v1 drafter: a block of masks attends to keys made from the target's taps.

Embedding and head are the target's. Context rows enter every layer only as keys and values:
c = norm(fc(taps)) is the input of the key and value projections (formulas as in the `dflash`
0.1.0 reference; own implementation).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DrafterConfig
from dflash_jax.graph.protocols import (
    CacheMaker,
    Draft,
    DraftSampler,
    SharedLayers,
    takes,
    with_kernels,
)
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.vocabulary import all_finite
from dflash_jax.nn.attention import (
    Positions,
    attend,
    rope_tables,
    rotate,
    slot_positions,
    visible,
    write_keys_values,
)
from dflash_jax.nn.layers import (
    GatedMLP,
    columns_of,
    declare,
    dot,
    halves,
    matrix,
    norm_weight,
    project,
    rms_norm,
    softcap,
    times,
    weight,
)
from dflash_jax.nn.objective import (
    Places,
    Scores,
    cross_entropy,
    distance,
    is_argmax,
    own_vocabulary,
    scores_of,
)
from dflash_jax.quant.layouts import HEAD, TABLE

Kept = TypeVar("Kept")
Attend = Callable[[Float[Array, "B T D"]], tuple[Float[Array, "B T D"], Kept]]


class DrafterAttention(nn.Module):
    """Attention with queries from the block, and keys and values from context and block."""

    config: DrafterConfig
    window: int | None
    causal: bool
    kernels: str

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        self.q = matrix(self, "q", (c.hidden_size, c.num_heads * c.head_dim), split=1)
        self.kv = matrix(self, "kv", (c.hidden_size, c.num_kv_heads, 2, c.head_dim), split=1)
        self.o = matrix(self, "o", (c.num_heads * c.head_dim, c.hidden_size), split=0)
        self.q_norm = norm_weight(self, "q_norm", c.head_dim)
        self.k_norm = norm_weight(self, "k_norm", c.head_dim)
        if c.attention_bias:
            self.q_bias = weight(self, "q_bias", (c.num_heads * c.head_dim,))
            self.kv_bias = weight(self, "kv_bias", (c.num_kv_heads, 2, c.head_dim))
            self.o_bias = weight(self, "o_bias", (c.hidden_size,))

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T K G H"]:
        """Return normed, rotated queries, grouped by the kv head that they read."""
        c = self.config
        q = dot(x, self.q)
        if c.attention_bias:
            q += self.q_bias[None, None]
        groups = c.num_heads // c.num_kv_heads
        q = q.reshape(*x.shape[:2], c.num_kv_heads, groups, c.head_dim)
        q = rms_norm(q, self.q_norm, c.rms_norm_eps, self.kernels)
        return rotate(q, *rope_tables(c.rope, c.head_dim, positions), self.kernels)

    def keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Return normed, rotated keys, and values, of context or block rows."""
        c = self.config
        kv = dot(x, self.kv)  # [B, T, K, 2, H]
        if c.attention_bias:
            kv += self.kv_bias[None, None]
        k, v = halves(kv)
        k = rms_norm(k, self.k_norm, c.rms_norm_eps, self.kernels)
        return rotate(k, *rope_tables(c.rope, c.head_dim, positions), self.kernels), v

    def output(self, heads: Float[Array, "B T N*H"]) -> Float[Array, "B T D"]:
        """Apply the output projection."""
        out = dot(heads, self.o)
        return out + self.o_bias[None, None] if self.config.attention_bias else out

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Positions
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        each = positions.each
        cache = write_finite(cache, *self.keys_values(x, each), positions, self.kernels)
        keys = slot_positions(positions.end, cache.slots)
        seen = visible(each, keys, causal=self.causal, window=self.window)
        if not positions.all_live:
            seen &= (each >= 0)[:, :, None]
        heads = attend(self.queries(x, each), cache, seen, self.kernels)
        return self.output(heads), cache


def write_finite(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Positions,
    kernels: str,
) -> LayerCache:
    """Write rows with non-finite numbers as 0, so that they do not affect later drafts."""
    k, v = (jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)) for x in (k, v))
    return write_keys_values(cache, k, v, positions, kernels)


class DrafterLayer(nn.Module):
    """A Qwen3 layer whose attention also sees the context keys."""

    config: DrafterConfig
    window: int | None
    causal: bool
    kernels: str = "xla"

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        self.input_norm = norm_weight(self, "input_norm", c.hidden_size)
        self.attention = DrafterAttention(c, self.window, self.causal, self.kernels)
        self.post_attention_norm = norm_weight(self, "post_attention_norm", c.hidden_size)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Positions
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        return self.around(x, lambda h: self.attention(h, cache, positions), positions.live)

    def around(
        self,
        x: Float[Array, "B T D"],
        attend: Attend[Kept],
        live: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Kept]:
        """Apply the layer with a given attention: x + attend(norm(x)), then x + mlp(norm(x)).

        Args:
          live: tokens that count; what is computed for the others is undefined. By default all do.
        """
        eps = self.config.rms_norm_eps
        with jax.named_scope("attention"):
            h, kept = attend(rms_norm(x, self.input_norm, eps, self.kernels))
            x = x + h
        with jax.named_scope("mlp"):
            h = rms_norm(x, self.post_attention_norm, eps, self.kernels, live)
            return self.mlp(h, x, live), kept


class DFlash(nn.Module):
    """The drafter (a `graph.protocols.Drafter`): taps become keys, and a block attends to them.

    Other kinds build on it. Its state is one `LayerCache` per layer.

    Attributes:
      layer: makes a layer from the config, its window, and whether it is causal in the block.
      kernels: kernels of norms, rotations, attention and largest numbers, as `Plan.kernels`.
    """

    config: DrafterConfig
    layer: Callable[..., Any] = DrafterLayer
    kernels: str = "xla"

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        self.fc = matrix(self, "fc", (len(c.target_layer_ids) * c.hidden_size, c.hidden_size))
        self.hidden_norm = norm_weight(self, "hidden_norm", c.hidden_size)
        self.layers = [
            with_kernels(self.layer(c, window, causal), self.kernels)
            for window, causal in zip(c.windows, c.causal, strict=True)
        ]
        self.norm = norm_weight(self, "norm", c.hidden_size)
        if c.own_embedding:
            self.embedding = matrix(self, "embed", (c.hidden_size, c.vocab_size), form=TABLE)
        if c.own_head:
            self.head = matrix(self, "head", (c.hidden_size, c.choices), split=1, form=HEAD)
        if c.draft_vocab_size:
            shape = (c.draft_vocab_size,)
            self.d2t = declare(self, "d2t", nn.initializers.zeros, shape, jnp.int32)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""
        return tuple(i + 1 for i in self.config.target_layer_ids)

    @property
    def trained_block(self) -> int:
        """The block that it was trained on; a step has room for a draft."""
        return max(self.config.step_width, 2)

    @property
    def block(self) -> int:
        """The block that its makers advise, at most the trained one."""
        drafts = self.config.speculative_tokens
        return min(drafts + 1, self.trained_block) if drafts else self.trained_block

    @property
    def reads(self) -> int:
        """Tokens past a row's position that it writes: it always sees a trained block."""
        return self.config.step_width

    @property
    def predicts_confidence(self) -> bool:
        """Whether its drafts have probabilities of acceptance."""
        return self.config.predicts_confidence

    def windowed(self, window: int) -> "DFlash":
        """Return the drafter with no layer that sees more than `window` positions."""
        windows = tuple(min(own or window, window) for own in self.config.windows)
        return self.clone(config=dataclasses.replace(self.config, windows=windows))

    def empty(self, make: CacheMaker) -> tuple[LayerCache, ...]:
        """Return empty context caches, one per layer."""
        c = self.config
        return tuple(make(c.num_kv_heads, c.head_dim, window) for window in c.windows)

    def fuse(self, taps: Sequence[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        """Return c = norm(fc(taps)), with the taps concatenated in config order."""
        c = dot(jnp.concatenate(taps, axis=-1), self.fc)
        return rms_norm(c, self.hidden_norm, self.config.rms_norm_eps, self.kernels)

    def observe(
        self,
        caches: Sequence[LayerCache],
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
        num_live: Int[Array, " B"] | None = None,
    ) -> tuple[LayerCache, ...]:
        """Return the caches with the context keys of T tokens at start .. start+T-1.

        Args:
          num_live: tokens of each row that count, the first ones; all by default.
        """
        with jax.named_scope("context"):
            c = self.fuse(taps)
            positions = Positions.of(start, c.shape[1], num_live)
            written = []
            for layer, cache in zip(self.layers, caches, strict=True):
                k, v = layer.attention.keys_values(c, positions.each)
                written.append(write_finite(cache, k, v, positions, self.kernels))
            return tuple(written)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
        idle: Bool[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """Run a block whose anchor is at position `start` of each row.

        Args:
          x: target embeddings of [anchor, mask, mask, ...].
          idle: rows whose blocks are not used; native kernels do not compute them.

        Returns:
          Hidden states after the final norm, including the anchor's row, and the caches. These
          hold the block's keys from `start` on, which later calls overwrite.
        """
        width = x.shape[1]
        num_live = None if idle is None else jnp.where(idle, 0, width)
        positions = Positions.of(start, width, num_live)
        x = positions.zero_dead(self.scaled(x))
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, positions)
            x = positions.zero_dead(x)
            written.append(cache)
        return rms_norm(x, self.norm, self.config.rms_norm_eps, self.kernels), tuple(written)

    def predict(
        self,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        num_drafts: int,
        idle: Bool[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B R N"], tuple[LayerCache, ...]]:
        """Return hidden states and logits of R drafted positions, and the caches after the call.

        Rows that are `idle` may get any finite numbers.

        Masks attend to each other: a drafter that was trained on longer blocks sees one of that
        length here, too, and its last positions are not used. The anchor's own position predicts
        nothing, except in a drafter that samples from it, which needs one mask less.
        """
        c = self.config
        length = num_drafts if c.sample_from_anchor else num_drafts + 1
        masks = (len(anchor), max(c.block_size, length) - 1)
        block = jnp.full(masks, c.mask_token_id, anchor.dtype)
        block = jnp.concatenate([anchor[:, None], block], axis=1)
        embed = self.embed if c.own_embedding else shared.embed
        skips = self.kernels == "native" and takes(self, "idle")  # subclasses may not
        arguments = (embed(block), caches, start)
        hidden, caches = self(*arguments, idle) if skips else self(*arguments)
        first = 0 if c.sample_from_anchor else 1
        hidden = hidden[:, first:length]
        said = project(hidden, self.head) if c.own_head else self.target_logits(hidden, shared)
        return hidden, self.adjust(said), caches

    def propose(
        self,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Draft each position for itself."""
        _, logits, caches = self.predict(
            caches, anchor, start, shared, sampler.num_drafts, sampler.idle
        )
        ids = self.tokens()
        choice = sampler.sample_all(logits, ids)
        drafted = sampler.draft(self.token(choice.index), choice.finite, logits=logits, ids=ids)
        return drafted, caches

    def walk(
        self,
        anchor: Int[Array, " B"],
        logits: Float[Array, "B R N"],
        sampler: DraftSampler,
        corrected: Callable[[int, Any, Any], tuple[Float[Array, "B N"], Any]],
        state: Any,
        confidence: Callable[[], Float[Array, "B R"] | None] = lambda: None,
    ) -> Draft:
        """Draft each position by the token chosen before it, from the anchor on.

        Args:
          corrected: (index of a position, the token before it, the state) -> the position's logits,
            the next state.
          confidence: called after all positions.
        """
        token = anchor
        finite = all_finite(logits, self.kernels).all(axis=1)
        path = []
        read = []
        for i in range(logits.shape[1]):
            own, state = corrected(i, token, state)
            choice = sampler.sample_one(own, i, self.tokens())
            token = self.token(choice.index)
            finite = finite & choice.finite
            path.append(token)
            read.append(own)
        likelihood = confidence()
        read_logits = None
        ids = None
        if sampler.keeps_logits:
            read_logits = jnp.stack(read, axis=1)
            ids = self.tokens()
        return sampler.draft(
            jnp.stack(path, axis=1),
            finite,
            confidence=likelihood,
            logits=read_logits,
            ids=ids,
        )

    def target_logits(
        self, hidden: Float[Array, "B T D"], shared: SharedLayers
    ) -> Float[Array, "B T N"]:
        """Return the logits of the target's head for the tokens that the drafter knows."""
        logits = shared.head(hidden)
        ids = self.tokens()
        return logits if ids is None else jnp.take(logits, ids, axis=-1)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return columns of the drafter's own embedding table."""
        return columns_of(self.embedding, tokens, self.norm.dtype)

    def tokens(self) -> Int[Array, " N"] | None:
        """Return the target's token of each logit; None for the whole vocabulary."""
        if not self.config.draft_vocab_size:
            return None
        return jnp.arange(self.config.draft_vocab_size) + self.d2t

    def token(self, index: Int[Array, "*positions"]) -> Int[Array, "*positions"]:
        """Return the target's tokens of indices into the logits."""
        ids = self.tokens()
        return index if ids is None else ids[index]

    def scaled(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return block embeddings, raw rows of the target's table, times the scale."""
        c = self.config
        scale = 1.0 if c.input_embedding_scale is None else c.input_embedding_scale
        if c.rounded_embedding_scale:
            return x * jnp.asarray(scale, x.dtype)
        return times(x, scale)

    def adjust(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """Apply the drafter's multiplier and softcap to the head's logits."""
        c = self.config
        logits = logits * jnp.float32(c.output_multiplier)
        return softcap(logits, c.final_logit_softcapping)

    def objective(self, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
        """Score each place for itself (a `nn.objective`)."""
        logits, p, labels, known = own_vocabulary(self, places, plain, p)
        nll = cross_entropy(logits, labels)
        return scores_of(
            known,
            loss=distance(loss, logits, nll, p),
            nll=nll,
            right=is_argmax(logits, labels),
            head=jnp.zeros_like(nll),
            head_counts=jnp.zeros(nll.shape, bool),
        )


def build(config: DrafterConfig) -> DFlash:
    """Return the drafter module of a config."""
    return DFlash(config)
