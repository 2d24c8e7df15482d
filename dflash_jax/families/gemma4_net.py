"""Gemma 4, text: four norms a layer, two kinds of attention, a scaled residual stream.

Full layers have other head widths and numbers, and may use their raw keys as values. The last
layers may have no keys: they read the cache of an earlier layer.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import EARLY, LATE, UPSTREAM
from dflash_jax.families.gemma4 import Gemma4Config
from dflash_jax.graph.protocols import CacheMaker, TargetOutput
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.nn.attention import (
    Positions,
    attend,
    rope_tables,
    rotate,
    slot_positions,
    visible,
    write_keys_values,
)
from dflash_jax.nn.decoder import Decoder
from dflash_jax.nn.layers import (
    GatedMLP,
    columns_of,
    dot,
    gated,
    gelu_tanh,
    matrix,
    norm_weight,
    rms_norm_wide,
    times,
    weight,
)
from dflash_jax.nn.moe import expert_weights, experts, gelu_gated, softmax_then_top
from dflash_jax.quant.layouts import ROUTER, TABLE

SCALE = 1.0  # factor of attention scores, as queries and keys are normed


class Gemma4Attention(nn.Module):
    """Attention of one layer.

    The fused weight holds, per kv head, G queries, then a key, then a value: no value if it is
    the key, and neither if the layer reads another's.
    """

    config: Gemma4Config
    layer: int
    kernels: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, positions: Positions
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        c = self.config
        window = self.config.windows[self.layer]
        kv_heads, width = c.heads(self.layer)
        groups = c.num_heads // kv_heads
        own = c.own_parts(self.layer)
        shape = (kv_heads, groups + own, width)
        qkv = dot(x, matrix(self, "qkv", (c.hidden_size, *shape), split=1))
        if c.attention_bias:
            qkv += weight(self, "qkv_bias", shape, split=0)[None, None]
        turn = rope_tables(c.full_rope if window is None else c.rope, width, positions.each)
        norm = functools.partial(rms_norm_wide, eps=c.rms_norm_eps, kernels=self.kernels)
        q_norm = norm_weight(self, "q_norm", width)
        q = rotate(norm(qkv[..., :groups, :], q_norm), *turn, self.kernels)
        if own:
            k_norm = norm_weight(self, "k_norm", width)
            k = rotate(norm(qkv[..., groups, :], k_norm), *turn, self.kernels)
            v = norm(qkv[..., -1, :], None)
            cache = write_keys_values(cache, k, v, positions, self.kernels)
        keys = slot_positions(positions.end, cache.slots)
        seen = visible(positions.each, keys, causal=True, window=window)
        heads = attend(q, cache, seen, self.kernels, scale=SCALE)
        out = dot(heads, matrix(self, "o", (c.num_heads * width, c.hidden_size), split=0))
        if c.attention_bias:
            out = positions.zero_dead(out + weight(self, "o_bias", (c.hidden_size,))[None, None])
        return out, cache


class Experts(nn.Module):
    """The weighted sum of each token's experts; the router reads the unnormed stream.

    Softmax over all experts, the largest few, divided by their sum, times a scale per expert.
    """

    config: Gemma4Config
    kernels: str

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Route by x and apply the experts to h."""
        c = self.config
        scale = norm_weight(self, "router_scale", c.hidden_size)[None, None]
        normed = rms_norm_wide(x, None, c.rms_norm_eps, self.kernels)
        seen = times(normed * scale, c.hidden_size**-0.5)
        logits = dot(seen, matrix(self, "router", (c.hidden_size, c.num_experts), form=ROUTER))
        stacks = expert_weights(self, c.num_experts, c.hidden_size, c.expert_size)
        ids, shares = softmax_then_top(
            logits, c.experts_per_token, normalise=True, native=stacks.native
        )
        of_each = norm_weight(self, "expert_scale", c.num_experts).astype(jnp.float32)
        shares *= jnp.take(of_each, ids, mode="clip")
        return experts(h, stacks, ids, shares, gelu_gated)


class PerLayerInput(nn.Module):
    """norm(project(gelu(gate(x)) · p)), where p is the token's vector for this layer."""

    config: Gemma4Config
    kernels: str

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], p: Float[Array, "B T P"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = dot(x, matrix(self, "gate", (c.hidden_size, c.per_layer_size)))
        gate_and_p = jnp.stack([gate, p], axis=-2)
        h = gated(gate_and_p, gelu_tanh, native=self.kernels == "native")
        h = dot(h, matrix(self, "project", (c.per_layer_size, c.hidden_size)))
        w = norm_weight(self, "norm", c.hidden_size)
        return rms_norm_wide(h, w, c.rms_norm_eps, self.kernels)


class Gemma4Layer(nn.Module):
    """Attention and MLP, each normed on both sides, then the per-layer input, then the scalar."""

    config: Gemma4Config
    layer: int
    kernels: str = "xla"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        positions: Positions,
        p: Float[Array, "B T P"] | None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LayerCache]:
        """Return the layer's output, the stream before its last two operations, and the cache."""
        c = self.config

        def norm(name: str, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            w = norm_weight(self, name, c.hidden_size)
            return rms_norm_wide(h, w, c.rms_norm_eps, self.kernels)

        with jax.named_scope("attention"):
            attention = Gemma4Attention(c, self.layer, self.kernels, name="attention")
            h, cache = attention(norm("input_norm", x), cache, positions)
            x = x + norm("post_attention_norm", h)
        with jax.named_scope("mlp"):
            mlp = GatedMLP(c.hidden_size, c.mlp_size(self.layer), gelu_tanh, name="mlp")
            h = mlp(norm("pre_mlp_norm", x))
            if c.num_experts:
                routed = Experts(c, self.kernels, name="routed")(x, norm("pre_experts_norm", x))
                h = norm("post_dense_norm", h) + norm("post_experts_norm", routed)
            early = x = x + norm("post_mlp_norm", h)
        if p is not None:
            x = x + PerLayerInput(c, self.kernels, name="per_layer")(x, p)
        return x * norm_weight(self, "scalar", 1)[None, None], early, cache


class Gemma4(Decoder):
    """The decoder with layers that may share caches and have per-layer inputs."""

    config: Gemma4Config  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        c = self.config
        if c.per_layer_size:
            rows = c.per_layer_rows or c.vocab_size
            width = c.num_layers * c.per_layer_size
            self.layer_embedding = matrix(self, "layer_embed", (width, rows), form=TABLE)
            shape = (c.num_layers, c.per_layer_size)
            self.layer_projection = matrix(self, "layer_project", (c.hidden_size, *shape))
            self.layer_norm = norm_weight(self, "layer_norm", c.per_layer_size)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
        *,
        taps: tuple[int, ...] = (),
        chunked: bool = False,  # no effect on attention
        taps_at: str = LATE,
        num_live: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """Run T tokens of each row; arguments and results as for `Decoder`.

        Args:
          caches: caches of the layers that have keys; the others read them after they are written.
        """
        positions = Positions.of(start, tokens.shape[1], num_live)
        x = positions.zero_dead(self.first(tokens))
        vectors = self.per_layer_inputs(tokens, x) if self.config.per_layer_size else None
        states = [x]
        written = list(caches)
        for i, layer in enumerate(self.layers):
            at = self.config.source(i)
            p = None if vectors is None else vectors[:, :, i]
            x, early, written[at] = layer(x, written[at], positions, p)
            x = positions.zero_dead(x)
            states.append(positions.zero_dead(early) if taps_at == EARLY else x)
        hidden = self.final_norm(x, self.norm, self.config.rms_norm_eps, self.kernels, None)
        if taps_at == UPSTREAM:
            states[-1] = hidden
        kept = tuple(states[i] for i in taps)
        return TargetOutput(hidden=hidden, taps=kept, caches=tuple(written))

    def empty_caches(self, make: CacheMaker) -> tuple[LayerCache, ...]:
        """Return one cache for each layer that has keys; layers that share have none."""
        c = self.config
        owners = range(c.num_layers - c.shared_layers)
        return tuple(make(*c.heads(i), c.windows[i]) for i in owners)

    def per_layer_inputs(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """Return (norm(project(x)) + the tokens' vectors) / sqrt(2), one vector per layer."""
        c = self.config
        own = columns_of(self.layer_embedding, tokens, self.norm.dtype)
        own = own.reshape(*tokens.shape, c.num_layers, c.per_layer_size)
        own *= jnp.asarray(c.per_layer_size**0.5, own.dtype)
        seen = times(dot(x, self.layer_projection), c.hidden_size**-0.5)
        seen = rms_norm_wide(seen, self.layer_norm, c.rms_norm_eps, self.kernels)
        return times(seen + own, 0.5**0.5)


def build(config: Gemma4Config) -> nn.Module:
    """Return the target module of a Gemma 4 config."""
    return Gemma4(config, make_layer=Gemma4Layer, final_norm=rms_norm_wide, width_invariant=True)
