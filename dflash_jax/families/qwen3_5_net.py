"""Qwen3.5 and Qwen3.6: Gated DeltaNet layers, and gated attention in every fourth layer.

Norms multiply by 1 + w, except the one inside the recurrent layers. Text only: vision and
multi-token-prediction weights are not part of the tree.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.families.qwen3_5 import HybridConfig
from dflash_jax.graph.protocols import CacheMaker
from dflash_jax.kernels.caches import Cache, LayerCache, RecurrentCache, Update
from dflash_jax.nn.attention import (
    Positions,
    attend,
    rope_tables,
    rotate_leading,
    slot_positions,
    visible,
    write_keys_values,
)
from dflash_jax.nn.decoder import Decoder
from dflash_jax.nn.delta import (
    DeltaInputs,
    DeltaUpdate,
    by_chunk,
    by_token,
    causal_conv,
    spread,
    unit,
)
from dflash_jax.nn.layers import (
    GatedMLP,
    dot,
    matrix,
    norm_weight,
    rms_norm,
    rms_norm_from_one,
    weight,
)
from dflash_jax.nn.moe import expert_weights, experts, softmax_then_top, swiglu
from dflash_jax.quant.layouts import ROUTER


class GatedAttention(nn.Module):
    """Attention with an output gate per head and dimension, and partly rotated heads.

    The fused weight holds, per kv head, G pairs of query and gate, then a key and a value.
    """

    config: HybridConfig
    kernels: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Positions
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        c = self.config
        groups = c.num_heads // c.num_kv_heads
        shape = (c.num_kv_heads, 2 * groups + 2, c.head_dim)
        fused = dot(x, matrix(self, "qkv", (c.hidden_size, *shape), split=1))  # [B, T, K, 2G+2, H]
        if c.attention_bias:
            fused += weight(self, "qkv_bias", shape, split=0)[None, None]
        pairs = fused[..., : 2 * groups, :].reshape(*fused.shape[:3], groups, 2, c.head_dim)
        q = pairs[..., 0, :]
        gate = pairs[..., 1, :]  # [B, T, K, G, H]
        k = fused[..., 2 * groups, :]
        v = fused[..., 2 * groups + 1, :]
        eps = c.rms_norm_eps
        q = rms_norm_from_one(q, norm_weight(self, "q_norm", c.head_dim), eps, self.kernels)
        k = rms_norm_from_one(k, norm_weight(self, "k_norm", c.head_dim), eps, self.kernels)
        turn = rope_tables(c.rope, c.rotary_dim, positions.each)
        q, k = (rotate_leading(a, *turn, self.kernels) for a in (q, k))
        cache = write_keys_values(cache, k, v, positions, self.kernels)
        keys = slot_positions(positions.end, cache.slots)
        seen = visible(positions.each, keys, causal=True, window=None)
        out = attend(q, cache, seen, self.kernels)
        out = out * jax.nn.sigmoid(gate).reshape(out.shape)
        out = dot(out, matrix(self, "o", (c.num_heads * c.head_dim, c.hidden_size), split=0))
        if c.attention_bias:
            out = positions.zero_dead(out + weight(self, "o_bias", (c.hidden_size,))[None, None])
        return out, cache


class GatedDelta(nn.Module):
    """A Gated DeltaNet mixer: convolution, gated delta rule and gated norm."""

    config: HybridConfig
    kernels: str

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        self.values = c.value_heads * c.value_width
        self.sizes = (c.conv_channels, self.values, c.value_heads, c.value_heads)
        self.in_proj = matrix(self, "in_proj", (c.hidden_size, sum(self.sizes)))
        self.conv = weight(self, "conv", (c.conv_kernel, c.conv_channels), 0.5)
        self.a_log = norm_weight(self, "a_log", c.value_heads)
        self.dt_bias = norm_weight(self, "dt_bias", c.value_heads)
        self.norm = norm_weight(self, "norm", c.value_width)
        self.out = matrix(self, "out", (self.values, c.hidden_size))

    def __call__(
        self, x: Float[Array, "B T D"], cache: RecurrentCache, *, chunked: bool
    ) -> tuple[Float[Array, "B T D"], Update]:
        u, z, b, a = _split(dot(x, self.in_proj), *self.sizes)
        inputs = jnp.concatenate([cache.inputs, u], axis=1)
        q, k, v = self.heads(inputs)
        rate = jnp.exp(self.a_log.astype(jnp.float32))
        step = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias.astype(jnp.float32)[None, None])
        rule = DeltaInputs(
            q=spread(q, self.config.value_heads),
            k=spread(k, self.config.value_heads),
            v=v,
            g=-rate[None, None] * step,
            beta=jax.nn.sigmoid(b.astype(jnp.float32)),
        )
        o, d = (by_chunk if chunked else by_token)(cache.state, rule)
        update = DeltaUpdate(cache=cache, inputs=inputs, k=k, d=d, g=rule.g, chunked=chunked)
        return dot(self.gated(o.astype(x.dtype), z), self.out), update

    def heads(
        self, inputs: Float[Array, "B W+T C"]
    ) -> tuple[Float[Array, "B T K P"], Float[Array, "B T K P"], Float[Array, "B T N Q"]]:
        """Return convolved queries and keys of unit length, queries scaled, and values; float32."""
        c = self.config
        keys = c.key_heads * c.key_width
        mixed = jax.nn.silu(causal_conv(inputs, self.conv))
        mixed = mixed.astype(inputs.dtype).astype(jnp.float32)
        q, k, v = _split(mixed, keys, keys, self.values)
        q, k = (x.reshape(*x.shape[:2], c.key_heads, c.key_width) for x in (q, k))
        v = v.reshape(*v.shape[:2], c.value_heads, c.value_width)
        return unit(q) * jnp.float32(c.key_width**-0.5), unit(k), v

    def gated(
        self, o: Float[Array, "B T N Q"], z: Float[Array, "B T N*Q"]
    ) -> Float[Array, "B T N*Q"]:
        """Apply the norm of each head, then its gate."""
        normed = rms_norm(o, self.norm, self.config.rms_norm_eps, self.kernels)
        gate = jax.nn.silu(z.astype(jnp.float32))
        return (normed.astype(jnp.float32).reshape(z.shape) * gate).astype(o.dtype)


class SharedExperts(nn.Module):
    """The chosen experts, and a shared one for every token, gated by a single logit."""

    config: HybridConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        logits = dot(x, matrix(self, "router", (c.hidden_size, c.num_experts), form=ROUTER))
        weights = expert_weights(self, c.num_experts, c.hidden_size, c.expert_size)
        chosen = softmax_then_top(
            logits, c.experts_per_token, normalise=True, native=weights.native
        )
        gate = jax.nn.sigmoid(dot(x, weight(self, "shared_gate", (c.hidden_size, 1))))
        shared = GatedMLP(c.hidden_size, c.shared_expert_size, name="shared")(x)
        return experts(x, weights, *chosen, swiglu) + gate * shared


class HybridLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    config: HybridConfig
    recurrent: bool
    kernels: str = "xla"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache | RecurrentCache,
        positions: Positions,
        *,
        chunked: bool,
    ) -> tuple[Float[Array, "B T D"], Update]:
        c = self.config
        with jax.named_scope("delta" if self.recurrent else "attention"):
            scale = norm_weight(self, "input_norm", c.hidden_size)
            h = rms_norm_from_one(x, scale, c.rms_norm_eps, self.kernels)
            if isinstance(cache, RecurrentCache):
                delta = GatedDelta(c, self.kernels, name="delta")
                h, update = delta(h, cache, chunked=chunked)
            else:
                attention = GatedAttention(c, self.kernels, name="attention")
                h, update = attention(h, cache, positions)
            x = x + h
        with jax.named_scope("mlp"):
            scale = norm_weight(self, "post_attention_norm", c.hidden_size)
            h = rms_norm_from_one(x, scale, c.rms_norm_eps, self.kernels)
            if c.num_experts:
                x = x + SharedExperts(c, name="mlp")(h)
            else:
                x = x + GatedMLP(c.hidden_size, c.intermediate_size, name="mlp")(h)
            return positions.zero_dead(x), update


def _split(x: Float[Array, "B T E"], *sizes: int) -> list[Float[Array, "B T part"]]:
    """Split the last axis into parts of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


class HybridDecoder(Decoder):
    """The decoder with recurrent layers."""

    config: HybridConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def empty_caches(self, make: CacheMaker) -> tuple[Cache, ...]:
        """Return caches: keys and values, or recurrent state and convolution inputs."""
        c = self.config
        state = (c.value_heads, c.key_width, c.value_width)
        inputs = (c.conv_kernel - 1, c.conv_channels)
        return tuple(
            make.recurrent(state, inputs) if recurrent else make(c.num_kv_heads, c.head_dim, None)
            for recurrent in c.recurrent
        )


def build(config: HybridConfig) -> nn.Module:
    """Return the target module of a Qwen3.5 config."""
    return HybridDecoder(config, make_layer=_layer, final_norm=rms_norm_from_one)


def _layer(config: HybridConfig, i: int) -> nn.Module:
    return HybridLayer(config, config.recurrent[i])
