"""Tensor names and GGUF forms: one file for each target family and drafter kind, found by name.

The file has the name of the one in `dflash_jax/config` that registers the family. All files
provide `slots(config)`, the parameters and the tensors that fill them. Optional are, of targets:

- `folder(config)`: how Hugging Face folders differ from the canonical tensors (`Folder`);
- `to_hf(config, dtype)`: the config.json of an export; without it, targets are not exported;
- `hf_stored(name, config)`: the tensors of such a folder that a canonical one becomes; without
  it, the same tensor;
- `from_gguf(fields, source)`: the fields of config.json that GGUF metadata holds;
- `GGUF_LAYER_NAMES`: GGUF names of tensors in a layer that differ from the usual ones;
- `gguf_origin(name, config, shapes)`: where a GGUF file holds a canonical tensor; without it,
  under its name in Hugging Face's form;
- `gguf_ignored(name, config)`: why a GGUF tensor is not needed, or None if it is unexpected;
- `to_gguf(config)`: the family's own GGUF metadata; without it, targets are not written as GGUF;
- `gguf_stored(name, config)`: the stored tensors that a canonical one becomes; without it, the
  same tensor by its name;
- `gguf_computed(config)`: further tensors of GGUF files, which follow from the configuration;
- `GGUF_ARCHITECTURES`: the architecture by `model_type`, if the family has several;
- `mrope_sections(config)`: the rotary sections of targets with several position rows;

and of drafters:

- `to_hf(config)`: the kind's own fields of `dflash_config`;
- `FIELDS`: the names of those fields;
- `SPECULATOR`: the class that the speculators layout names, if that layout has the kind;
- `SPECULATOR_FIELDS`, `SPECULATOR_TENSORS`: its names of fields, and its prefixes of tensors, that
  differ;
- `GGUF_NAMES`, `GGUF_LAYER_NAMES`: GGUF spellings of tensors, and of those in a layer;
- `GGUF_MARKS`: tensors any of which shows that a GGUF file holds this kind;
- `GGUF_FLAT`: tensors that some writers store without their axes of length 1;
- `from_gguf(fields, shapes)`, `to_gguf(config)`: the kind's own fields in GGUF metadata; without
  the second, drafters are not written as GGUF.
"""

from types import ModuleType
from typing import Any

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.config.family import (
    CONVERTER,
    drafter_kinds,
    family_of,
    model_types,
    part,
    target_families,
)
from dflash_jax.converters.names.slots import Folder, Slot
from dflash_jax.errors import ConfigError


def slots(config: AttentionConfig) -> list[Slot]:
    """Return the parameters of a target or of a drafter.

    Raises:
      ConfigError: nothing is registered for this configuration.
    """
    return _file(config).slots(config)


def folder(config: TargetConfig) -> Folder:
    """Return what to expect of a Hugging Face folder that holds this target."""
    found = provided(family_of(config.model_type), "folder")
    return found(config) if found else Folder()


def provided(name: str, attribute: str, default: Any = None) -> Any:
    """Return what the file of a family or kind provides, such as a function."""
    return getattr(_module(name), attribute, default)


def providing(attribute: str) -> tuple[str, ...]:
    """Return the target families whose files provide something, such as `to_hf`."""
    return tuple(name for name in target_families() if provided(name, attribute))


def _file(config: AttentionConfig) -> ModuleType:
    if isinstance(config, DrafterConfig) and config.kind in drafter_kinds():
        return _module(config.kind)
    if isinstance(config, TargetConfig) and config.model_type in model_types():
        return _module(family_of(config.model_type))
    kind = config.model_type if isinstance(config, TargetConfig) else type(config).__name__
    raise ConfigError(
        f"no name table for {kind}; there is one for {', '.join(target_families())} and drafters"
    )


def _module(name: str) -> ModuleType:
    return part(name, CONVERTER)
