"""SmolLM3: Llama with layers that do not rotate."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a SmolLM3 config."""
    return Decoder(config)
