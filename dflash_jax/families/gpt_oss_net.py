"""gpt-oss: attention sinks, biases, and experts with a clamped activation in every layer."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.families.gpt_oss import GptOssConfig
from dflash_jax.nn.decoder import Decoder, Layer
from dflash_jax.nn.layers import dot, matrix, rms_norm_wide, weight
from dflash_jax.nn.moe import expert_weights, experts, top_then_softmax
from dflash_jax.quant.layouts import ROUTER


class ClampedMLP(nn.Module):
    """The experts with the largest logits, weighted by a softmax over these logits."""

    config: GptOssConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        logits = dot(x, matrix(self, "router", (c.hidden_size, c.num_experts), form=ROUTER))
        logits += weight(self, "router_bias", (c.num_experts,))[None, None]
        stacks = expert_weights(self, c.num_experts, c.hidden_size, c.expert_size, bias=True)
        ids, shares = top_then_softmax(logits, c.experts_per_token, native=stacks.native)
        activation = functools.partial(clamped, limit=c.swiglu_limit, alpha=c.swiglu_alpha)
        return experts(x, stacks, ids, shares, activation)


def clamped(gate: Array, up: Array, *, limit: float, alpha: float) -> Array:
    """Return (up + 1) · gate · sigmoid(alpha gate), gate clamped from above, up on both sides."""
    most = jnp.asarray(limit, gate.dtype)
    gate = jnp.minimum(gate, most)
    up = jnp.clip(up, -most, most)
    one, sharp = (jnp.asarray(v, gate.dtype) for v in (1.0, alpha))
    return (up + one) * (gate * nn.sigmoid(gate * sharp))


def build(config: GptOssConfig) -> nn.Module:
    """Return the target module of a gpt-oss config."""
    return Decoder(config, make_layer=_layer, final_norm=rms_norm_wide, width_invariant=True)


def _layer(config: GptOssConfig, i: int) -> nn.Module:
    return Layer(config, config.windows[i], _clamped_mlp, norm=rms_norm_wide, sinks=True)


def _clamped_mlp(config: GptOssConfig) -> nn.Module:
    return ClampedMLP(config, name="mlp")
