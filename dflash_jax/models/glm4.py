"""GLM-4, dense: partly rotated heads, and norms around attention and MLP."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of a GLM-4 config."""
    return Decoder(config)
