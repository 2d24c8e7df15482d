"""Configurations of targets and drafters, read from Hugging Face `config.json` files.

Files as published and as transformers 5 writes them are read. A field that changes what a model
computes is applied or refused; one that nobody here knows is ignored with a warning, and silently
if it is neutral or of training.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dflash_jax.config import DrafterConfig, TargetConfig, first_id, id_tuple, wrong_role
from dflash_jax.config.drafter import DrafterFields
from dflash_jax.config.fields import Fields, has_file, read_json, take_quantization
from dflash_jax.errors import ConfigError
from dflash_jax.families import (
    drafter_architectures,
    drafter_kinds,
    model_types,
    projector_types,
    target_families,
)
from dflash_jax.families.entry import Family

OF_DRAFTERS = "qwen3"  # the family whose defaults drafters have
DRAFTER_FIELDS = ("dflash_config", "dspark_config", "target_layer_ids", "speculators_model_type")


def is_drafter(fields: dict[str, Any]) -> bool:
    """Return whether a Hugging Face config describes a drafter, of any layout."""
    named = fields.get("architectures")
    names = named if isinstance(named, list) else []
    known = any(isinstance(name, str) and name in drafter_architectures() for name in names)
    return known or any(name in fields for name in DRAFTER_FIELDS)


def target_config(fields: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """Return the target that a Hugging Face config describes.

    Args:
      where: the file's name, for errors.

    Raises:
      ConfigError: the family is not known, or a field that changes the output not supported.
    """
    if is_drafter(fields):
        raise wrong_role(where, "target")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types():
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(model_types()))}"
        )
    family = target_families()[model_types()[model_type]]
    reader = _reader(fields, where, family)
    config = family.from_hf(reader)
    reader.check_rest()
    return dataclasses.replace(
        config,
        bos_token_id=_token_id(fields, "bos_token_id", config.vocab_size),
        pad_token_id=_token_id(fields, "pad_token_id", config.vocab_size),
    )


def _reader(fields: dict[str, Any], where: str, family: Family) -> Fields:
    """Return a reader of a config whose absent fields have the defaults of a family."""
    return Fields(fields, where, defaults=family.defaults, optional_window=family.optional_window)


def _token_id(fields: dict[str, Any], name: str, vocab_size: int) -> int | None:
    """Return a special id of a config, or of the text part of a multimodal one."""
    text = fields.get("text_config")
    places = [fields, *([text] if isinstance(text, dict) else [])]
    named = (place[name] for place in places if place.get(name) is not None)
    return first_id(next(named, None), vocab_size)


def drafter_config(fields: dict[str, Any], where: str = "config.json") -> DrafterConfig:
    """Return the drafter that a published config describes, of the kind in `architectures`.

    Args:
      where: the file's name, for errors.

    Raises:
      ConfigError: the kind is not known, or a field that changes the output not supported.
    """
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in model_types() and not is_drafter(fields):
        raise wrong_role(where, "drafter")
    if fields.get("model_type") in (None, "dspark"):
        fields = fields | {"model_type": OF_DRAFTERS}
    outer = _reader(fields, where, target_families()[OF_DRAFTERS])
    heads = outer.inner("dspark_config")  # where SpecForge writes a part of the fields
    own = outer.inner("dflash_config")
    both = DrafterFields(outer, Fields(own.values | heads.values, own.where))
    config = drafter_kinds()[_drafter_kind(both)].from_hf(both)
    outer.check_rest()
    both.dflash.check_rest()
    return config


def _drafter_kind(fields: DrafterFields) -> str:
    where = fields.outer.where
    known = drafter_architectures()
    named = fields.outer.get("architectures", ["DFlashDraftModel"])
    if not isinstance(named, list) or named not in [[name] for name in known]:
        raise ConfigError(f"{where}: architectures is {named}; expected one of {', '.join(known)}")
    kind = known[named[0]]
    projectors = projector_types()
    projector = fields.dflash.get("projector_type", kind)
    if kind == "dflash" and projector in tuple(projectors):
        return projectors[projector]
    if projector != kind:
        raise ConfigError(
            f"{where}: projector_type is {projector!r} in a {named[0]}; only"
            f" {', '.join(projectors)} are supported"
        )
    return kind


def read_target_config(directory: Path) -> TargetConfig:
    """Return the target in a Hugging Face directory, with the end tokens of both its configs.

    Raises:
      ConfigError, CheckpointError: as of `target_config` and `read_json`.
    """
    fields = read_json(directory / "config.json")
    take_quantization(fields)
    config = target_config(fields, str(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = id_tuple(read_json(generation).get("eos_token_id")) if has_file(generation) else ()
    ids = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return dataclasses.replace(config, eos_token_ids=ids)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Return the drafter in a Hugging Face directory.

    Raises:
      ConfigError, CheckpointError: as of `drafter_config` and `read_json`.
    """
    fields = read_json(directory / "config.json")
    take_quantization(fields)
    return drafter_config(fields, str(directory / "config.json"))
