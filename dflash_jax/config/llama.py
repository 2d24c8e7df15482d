"""Llama 3.x."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """The config of a dense Llama."""
    f.must_be("mlp_bias", False)
    return TargetConfig(**dense_fields(f))
