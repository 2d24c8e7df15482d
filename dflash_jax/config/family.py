"""Target families and drafter kinds, each registered once and found by file name.

A file of this folder that defines `FAMILY` adds a target architecture, one that defines
`DRAFTER` a kind of drafter. Two other files of the same name complete it: its module in
`dflash_jax/models`, its tensor names and GGUF form in `converters/families`.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A target architecture.

    Attributes:
      config: the class of its configurations, a `TargetConfig`.
      from_hf: makes a configuration from the `Fields` of a config.json.
      model_types: its `model_type` values, of text models and of files that wrap one.
      gguf: its `general.architecture` values in GGUF files.
      defaults: by `model_type`, what transformers takes for absent fields. Sizes that decide
        the shape of most weights have none: files must have them.
      optional_window: whether `sliding_window` counts only with `use_sliding_window`.
      any_width: whether native kernels give a token the same bits in calls of any width, which
        `tests/kernels/test_widths.py` shows. It does without experts only.
    """

    config: type[Any]
    from_hf: Callable[[Any], Any]
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    defaults: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    optional_window: bool = False
    any_width: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
      config: the class of its configurations, a `DrafterConfig` whose `kind` is the file's name.
      from_hf: makes a configuration from the `DrafterFields` of a config.json.
      architectures: its `architectures` values; exports write the first.
      projector_types: its `projector_type` values, which SpecForge and ModelOpt write.
      own_tables: whether it may have its own embedding and head over the whole vocabulary.
    """

    config: type[Any]
    from_hf: Callable[[Any], Any]
    architectures: tuple[str, ...]
    projector_types: tuple[str, ...] = ()
    own_tables: bool = False


@functools.cache
def target_families() -> Mapping[str, Family]:
    """Return every registered target family, by file name."""
    return _registered("FAMILY")


@functools.cache
def drafter_kinds() -> Mapping[str, DrafterKind]:
    """Return every registered kind of drafter, by file name."""
    return _registered("DRAFTER")


@functools.cache
def model_types() -> Mapping[str, str]:
    """Return the family of each known `model_type`."""
    return _index((name, family.model_types) for name, family in target_families().items())


@functools.cache
def gguf_architectures() -> Mapping[str, str]:
    """Return the family of each known `general.architecture` of a GGUF target."""
    return _index((name, family.gguf) for name, family in target_families().items())


@functools.cache
def drafter_architectures() -> Mapping[str, str]:
    """Return the kind of each known entry of a drafter's `architectures`."""
    return _index((name, kind.architectures) for name, kind in drafter_kinds().items())


@functools.cache
def projector_types() -> Mapping[str, str]:
    """Return the kind of each known `projector_type`."""
    return _index((name, kind.projector_types) for name, kind in drafter_kinds().items())


@functools.cache
def config_classes() -> Mapping[str, type[Any]]:
    """Return every class of configurations, by its name."""
    entries = (*target_families().values(), *drafter_kinds().values())
    return {entry.config.__name__: entry.config for entry in entries}


def family_of(model_type: str) -> str:
    """Return the file name of a target's family.

    Raises:
      ConfigError: no family has this `model_type`.
    """
    if model_type not in model_types():
        raise ConfigError(
            f"model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(model_types()))}"
        )
    return model_types()[model_type]


def _registered(attribute: str) -> dict[str, Any]:
    """Return the attribute of each file in this folder that has it, by file name."""
    package = importlib.import_module("dflash_jax.config")
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        if (entry := getattr(module, attribute, None)) is not None:
            found[file.name] = entry
    return found


def _index(claims: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Return the file that claims each key."""
    found: dict[str, str] = {}
    for name, keys in claims:
        for key in keys:
            if found.setdefault(key, name) != name:
                raise ConfigError(
                    f"config/{found[key]}.py and config/{name}.py both claim {key!r}; remove it"
                    " from one of them"
                )
    return found
