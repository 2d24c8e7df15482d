"""Gemma 3, text: norms of 1 + w around attention and MLP, and GELU."""

import flax.linen as nn

from dflash_jax.families.gemma3 import Gemma3Config
from dflash_jax.nn.decoder import Decoder, Layer
from dflash_jax.nn.layers import GatedMLP, gelu_tanh, rms_norm_from_one


def build(config: Gemma3Config) -> nn.Module:
    """Return the target module of a Gemma 3 config."""
    return Decoder(config, make_layer=_layer, final_norm=rms_norm_from_one, width_invariant=True)


def _layer(config: Gemma3Config, i: int) -> nn.Module:
    return Layer(config, config.windows[i], _gelu_mlp, norm=rms_norm_from_one)


def _gelu_mlp(config: Gemma3Config) -> nn.Module:
    return GatedMLP(config.hidden_size, config.intermediate_size, gelu_tanh, name="mlp")
