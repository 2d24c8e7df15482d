"""OLMo 2: norms after attention and MLP, rounded once."""

import flax.linen as nn

from dflash_jax.config import TargetConfig
from dflash_jax.nn.decoder import Decoder, Layer
from dflash_jax.nn.layers import rms_norm_wide


def build(config: TargetConfig) -> nn.Module:
    """Return the target module of an OLMo 2 config."""
    return Decoder(config, make_layer=_layer, final_norm=rms_norm_wide, width_invariant=True)


def _layer(config: TargetConfig, i: int) -> nn.Module:
    return Layer(config, config.windows[i], norm=rms_norm_wide)
