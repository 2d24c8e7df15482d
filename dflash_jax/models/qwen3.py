"""Qwen3, dense: queries and keys are normalised per head before rotation."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Qwen3 config."""
    return Decoder(config)
