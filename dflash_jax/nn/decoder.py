"""The pre-norm decoder that most families share: attention, layer, and the whole stack."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.config import LATE, UPSTREAM, TargetConfig
from dflash_jax.nn.attention import attend, slot_positions, visible, write_rows
from dflash_jax.nn.layers import (
    GatedMLP,
    columns_of,
    dot,
    norm_weight,
    project,
    rms_norm,
    softcap,
    weight,
)
from dflash_jax.nn.rope import rope_tables, rotate
from dflash_jax.state import Cache, LayerCache, Update


@struct.dataclass
class TargetOutput:
    """A forward pass: its T rows are written or kept in updates, but nothing is committed."""

    hidden: Float[Array, "B T D"]  # after the final norm
    taps: tuple[Float[Array, "B T D"], ...]
    caches: tuple[Update, ...]


class Attention(nn.Module):
    """Grouped-query attention; the fused weight holds, per kv head, G queries, a key, a value."""

    config: TargetConfig
    window: int | None
    sinks: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        c = self.config
        groups = c.num_heads // c.num_kv_heads
        shape = (c.num_kv_heads, groups + 2, c.head_dim)
        qkv = dot(x, weight(self, "qkv", (c.hidden_size, *shape), split=1))  # [B, T, K, G+2, H]
        if c.attention_bias:
            qkv += weight(self, "qkv_bias", shape, split=0)[None, None]
        qk, v = qkv[..., : groups + 1, :], qkv[..., groups + 1, :]
        if c.qk_norm:
            q_norm = norm_weight(self, "q_norm", c.head_dim)
            k_norm = norm_weight(self, "k_norm", c.head_dim)
            qk = rms_norm(qk, jnp.stack([*[q_norm] * groups, k_norm]), c.rms_norm_eps)
        cos, sin = rope_tables(c.rope, c.head_dim, positions)
        start, end = positions[:, 0], positions[:, -1] + 1
        qk = rotate(qk, cos, sin)
        q, k = qk[..., :groups, :], qk[..., groups, :]
        cache = write_rows(cache, k, v, start)
        keys = slot_positions(end, cache.slots)
        seen = visible(positions, keys, causal=True, window=self.window)
        sinks = weight(self, "sinks", (c.num_kv_heads, groups), split=0) if self.sinks else None
        out = dot(
            attend(q, cache, seen, sinks=sinks),
            weight(self, "o", (c.num_heads * c.head_dim, c.hidden_size), split=0),
        )
        if c.attention_bias:
            out += weight(self, "o_bias", (c.hidden_size,))[None, None]
        return out, cache


def dense_mlp(config: TargetConfig) -> nn.Module:
    """The MLP of Llama and Qwen3, part of a layer."""
    bias = config.mlp_bias
    return GatedMLP(config.hidden_size, config.intermediate_size, bias=bias, name="mlp")


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
      make_mlp: makes the second half from the config; called within the layer.
      norm: both norms, as (x, weight, eps).
      sinks: whether each head has an attention sink.
    """

    config: TargetConfig
    window: int | None
    make_mlp: Callable[[Any], nn.Module] = dense_mlp
    norm: Callable[[Array, Array, float], Array] = rms_norm
    sinks: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        positions: Int[Array, "B T"],
        *,
        chunked: bool,  # of no concern to attention
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        c = self.config
        with jax.named_scope("attention"):
            h = self.norm(x, norm_weight(self, "input_norm", c.hidden_size), c.rms_norm_eps)
            attention = Attention(c, self.window, self.sinks, name="attention")
            h, cache = attention(h, cache, positions)
            x = x + h
        with jax.named_scope("mlp"):
            scale = norm_weight(self, "post_attention_norm", c.hidden_size)
            x = x + self.make_mlp(c)(self.norm(x, scale, c.rms_norm_eps))
        return x, cache


def dense_layer(config: TargetConfig, i: int) -> nn.Module:
    """Layer i of Llama and Qwen3."""
    return Layer(config, config.windows[i] if config.windows else None)


class Decoder(nn.Module):
    """Embedding, layers and final norm; the head [D, V] is a method of its own.

    Tables are [D, V] as heads are, so that one can be the other: what is multiplied in every
    step decides the layout, and the few embeddings of a step are gathered from columns.

    The layer loop is unrolled over per-layer parameters: stacked weights sliced in an
    unrolled loop would be copied in every call.
    """

    config: TargetConfig
    make_layer: Callable[[Any, int], nn.Module] = dense_layer
    final_norm: Callable[[Array, Array, float], Array] = rms_norm

    def setup(self) -> None:
        c = self.config
        if not c.tie_embeddings:
            self.embedding = weight(self, "embed", (c.hidden_size, c.vocab_size))
        self.layers = [self.make_layer(c, i) for i in range(c.num_layers)]
        self.norm = norm_weight(self, "norm", c.hidden_size)
        self.head = weight(self, "head", (c.hidden_size, c.vocab_size), split=1)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: Sequence[Cache],
        start: Int[Array, " B"],
        *,
        taps: tuple[int, ...] = (),
        chunked: bool = False,
        taps_at: str = LATE,
    ) -> TargetOutput:
        """Runs T tokens at positions start .. start+T-1 of each row.

        Args:
          chunked: recurrent layers take the tokens together, not one after the other.
          taps: which hidden states to return; 0 is the input of layer 0, i+1 the output of
            layer i (the last one before the final norm).
          taps_at: UPSTREAM takes the last one after the final norm; EARLY is LATE here.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
        x = self.first(tokens)
        states, written = [x], []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, positions, chunked=chunked)
            states.append(x)
            written.append(cache)
        hidden = self.final_norm(x, self.norm, self.config.rms_norm_eps)
        if taps_at == UPSTREAM:
            states[-1] = hidden
        kept = tuple(states[i] for i in taps)
        return TargetOutput(hidden=hidden, taps=kept, caches=tuple(written))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Raw columns of the embedding table, which may be the head."""
        tied = self.config.tie_embeddings
        return columns_of(self.head if tied else self.embedding, tokens, self.norm.dtype)

    def first(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings, scaled where the family does so: the input of layer 0."""
        x = self.embed(tokens)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The language-model head, softcapped where the family does so; float32."""
        return softcap(self.raw_logits(hidden), self.config.final_softcap)

    def raw_logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The head alone, for drafters, which cap by themselves."""
        with jax.named_scope("head"):
            return project(hidden, self.head)


def empty_caches(
    config: TargetConfig, cache: Callable[[int, int, int | None], LayerCache]
) -> tuple[LayerCache, ...]:
    """Caches of a `Decoder` in which every layer attends with the same heads."""
    windows = config.windows or (None,) * config.num_layers
    return tuple(cache(config.num_kv_heads, config.head_dim, window) for window in windows)
