"""Model architectures, looked up by file name: one target family per file, and the drafter."""

import importlib

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.models.dflash import DFlash
from dflash_jax.nn.decoder import Decoder


def build_target(config: TargetConfig) -> Decoder:
    """The module of a target config."""
    return importlib.import_module(f"dflash_jax.models.{config.model_type}").build(config)


def build_drafter(config: DrafterConfig) -> DFlash:
    """The module of a drafter config."""
    return importlib.import_module(f"dflash_jax.models.{config.kind}").build(config)
