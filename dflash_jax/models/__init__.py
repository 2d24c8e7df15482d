"""Model architectures, looked up by file name: one target family or drafter kind per file.

A file provides `build(config)`, its module. That of a target family also provides
`empty_caches(config, cache)`, the per-layer caches of an empty state, made with the given
constructor.
"""

import importlib
from types import ModuleType
from typing import Any, Protocol

from dflash_jax.config import DrafterConfig, TargetConfig, family_of
from dflash_jax.nn.decoder import Decoder
from dflash_jax.state import Cache, LayerCache, RecurrentCache


class MakeCache(Protocol):
    """Makes empty caches: called for attention layers, by name for recurrent ones."""

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache: ...

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache: ...


class Drafter(Protocol):
    """A drafter's module. Its methods: the call, `context` and `propose` (see `DFlash`)."""

    @property
    def config(self) -> DrafterConfig: ...

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Makes parameters, as of a Linen module."""
        ...

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a method, as of a Linen module."""
        ...


def build_target(config: TargetConfig) -> Decoder:
    """The module of a target config."""
    return _family(family_of(config.model_type)).build(config)


def target_caches(config: TargetConfig, cache: MakeCache) -> tuple[Cache, ...]:
    """Empty caches of a target, one per layer."""
    return _family(family_of(config.model_type)).empty_caches(config, cache)


def build_drafter(config: DrafterConfig) -> Drafter:
    """The module of a drafter config."""
    return _family(config.kind).build(config)


def drafter_caches(config: DrafterConfig, cache: MakeCache) -> tuple[LayerCache, ...]:
    """Empty context caches of a drafter, one per layer."""
    return tuple(cache(config.num_kv_heads, config.head_dim, window) for window in config.windows)


def _family(name: str) -> ModuleType:
    return importlib.import_module(f"dflash_jax.models.{name}")
