"""Llama, and all families of which the config says how they differ from it."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the shared decoder for a config."""
    return Decoder(config, width_invariant=True)
