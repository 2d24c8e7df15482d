"""Mistral and Ministral: Llama with windows."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Mistral config."""
    return Decoder(config)
