"""Granite, dense: Llama with factors of embeddings, scores, residuals and logits."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a Granite config."""
    return Decoder(config)
