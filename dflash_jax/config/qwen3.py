"""Qwen3, dense."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """The config of a dense Qwen3."""
    return TargetConfig(**dense_fields(f), qk_norm=True)
