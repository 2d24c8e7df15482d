"""Modules of target families and drafter kinds: one file each, found by name.

The file has the name of the one in `dflash_jax/config` that registers the family. It provides
`build(config)`, the module. A target's file also provides `empty_caches(config, cache)`, the
per-layer caches of an empty state, made with the given constructor.
"""

import importlib
from types import ModuleType
from typing import Any, Protocol

from dflash_jax.config import DrafterConfig, TargetConfig, family_of
from dflash_jax.nn.decoder import Decoder
from dflash_jax.state import Cache, LayerCache, RecurrentCache


class MakeCache(Protocol):
    """Constructor of empty caches: the call for attention layers, `recurrent` for the others."""

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache: ...

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """Return the cache of a recurrent layer: its state [N, P, Q] and inputs [W, C]."""
        ...


class Drafter(Protocol):
    """A drafter's module, with methods `__call__`, `context` and `propose` (see `DFlash`)."""

    @property
    def config(self) -> DrafterConfig:
        """The configuration."""
        ...

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Return parameters, as `nn.Module.init` does."""
        ...

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Run a method, as `nn.Module.apply` does."""
        ...


def build_target(config: TargetConfig) -> Decoder:
    """Return the module of a target config.

    Raises:
      ConfigError: the family is not known.
    """
    return _family(family_of(config.model_type)).build(config)


def target_caches(config: TargetConfig, cache: MakeCache) -> tuple[Cache, ...]:
    """Return the empty caches of a target, one per layer that has its own."""
    return _family(family_of(config.model_type)).empty_caches(config, cache)


def build_drafter(config: DrafterConfig) -> Drafter:
    """Return the module of a drafter config."""
    return _family(config.kind).build(config)


def drafter_caches(config: DrafterConfig, cache: MakeCache) -> tuple[LayerCache, ...]:
    """Return the empty context caches of a drafter, one per layer."""
    return tuple(cache(config.num_kv_heads, config.head_dim, window) for window in config.windows)


def _family(name: str) -> ModuleType:
    return importlib.import_module(f"dflash_jax.models.{name}")
