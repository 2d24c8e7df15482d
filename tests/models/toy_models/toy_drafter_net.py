"""The module of the made-up kind of drafter: DFlash, its hidden states scaled."""

from typing import Any

import flax.linen as nn

from dflash_jax.families.dflash_net import DFlash
from dflash_jax.nn.layers import norm_weight
from toy_models.toy_drafter import ToyDrafterConfig


class ToyDrafter(DFlash):
    config: ToyDrafterConfig

    def setup(self) -> None:
        super().setup()
        self.toy_gain = norm_weight(self, "toy_gain", self.config.hidden_size)

    def __call__(self, x: Any, caches: Any, start: Any) -> Any:
        hidden, caches = super().__call__(x, caches, start)
        gain = self.toy_gain[None, None].astype(hidden.dtype)
        return hidden * gain * hidden.dtype.type(self.config.toy_scale), caches


def build(config: ToyDrafterConfig) -> nn.Module:
    return ToyDrafter(config)
