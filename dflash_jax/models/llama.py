"""Llama 3.x: llama3-scaled rotary embedding, no norm on queries and keys."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Llama config."""
    return Decoder(config)
