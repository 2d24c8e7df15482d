"""A made-up family: Llama whose MLPs have one projection up and squared ReLUs."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    return TargetConfig(**dense_fields(f))


FAMILY = Family(config=TargetConfig, from_hf=from_hf, model_types=("toy",), gguf=("toy-lm",))
