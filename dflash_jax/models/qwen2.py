"""Qwen2 and Qwen2.5, dense: Llama with biases of queries, keys and values."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Qwen2 config."""
    return Decoder(config)
