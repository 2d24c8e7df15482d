"""Qwen3-MoE: Qwen3 with experts instead of an MLP in most layers."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.families.qwen3_moe import Qwen3MoeConfig
from dflash_jax.nn.decoder import Decoder, Layer, dense_mlp
from dflash_jax.nn.layers import dot, matrix
from dflash_jax.nn.moe import expert_weights, experts, softmax_then_top, swiglu
from dflash_jax.quant.layouts import ROUTER


class SparseMLP(nn.Module):
    """The experts with the largest softmax weights, weighted by them."""

    config: Qwen3MoeConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        logits = dot(x, matrix(self, "router", (c.hidden_size, c.num_experts), form=ROUTER))
        stacks = expert_weights(self, c.num_experts, c.hidden_size, c.expert_size)
        ids, shares = softmax_then_top(
            logits, c.experts_per_token, normalise=c.normalise_shares, native=stacks.native
        )
        shares = shares.astype(x.dtype).astype(jnp.float32)  # rounded as in transformers
        return experts(x, stacks, ids, shares, swiglu)


def build(config: Qwen3MoeConfig) -> nn.Module:
    """Return the target module of a Qwen3-MoE config."""
    return Decoder(config, make_layer=_layer, width_invariant=True)


def _layer(config: Qwen3MoeConfig, i: int) -> nn.Module:
    window = config.windows[i] if config.windows else None
    return Layer(config, window, _sparse_mlp if config.sparse[i] else dense_mlp)


def _sparse_mlp(config: Qwen3MoeConfig) -> nn.Module:
    return SparseMLP(config, name="mlp")
