"""The module of the made-up family."""

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.config.base import TargetConfig
from dflash_jax.nn.decoder import Decoder, Layer
from dflash_jax.nn.layers import dot, matrix


class SquaredMLP(nn.Module):
    config: TargetConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        h = nn.relu(dot(x, matrix(self, "up", (width, inner), split=1)))
        return dot(h * h, matrix(self, "down", (inner, width), split=0))


def build(config: TargetConfig) -> nn.Module:
    return Decoder(config, make_layer=_layer)


def _layer(config: TargetConfig, i: int) -> nn.Module:
    return Layer(config, config.windows[i], lambda c: SquaredMLP(c, name="mlp"))
