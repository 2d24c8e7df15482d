"""Phi-3 and Phi-4-mini: Llama with partly rotated heads."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Phi-3 config."""
    return Decoder(config)
