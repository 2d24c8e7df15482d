"""Configurations of targets and drafters, read from Hugging Face `config.json` files.

Each family has a file here (see `family`). Files as published and as transformers 5 writes them
are read. A field that changes what a model computes is applied or refused; one that nobody here
knows is ignored with a warning, and silently if it is neutral or of training. This package never
imports jax.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dflash_jax.config.base import (
    ALWAYS_FLOAT32,
    AUTO,
    EARLY,
    FULL,
    LATE,
    SLIDING,
    TAPS_AT,
    UPSTREAM,
    AttentionConfig,
    RopeConfig,
    TargetConfig,
    first_id,
    id_tuple,
    window_kinds,
)
from dflash_jax.config.dflash import DrafterConfig, DrafterFields
from dflash_jax.config.family import (
    drafter_architectures,
    drafter_kinds,
    family_of,
    model_types,
    projector_types,
    target_families,
)
from dflash_jax.config.fields import Fields, has_file, is_gguf, read_json, take_quantization
from dflash_jax.config.qwen3_5 import LINEAR, HybridConfig
from dflash_jax.errors import ConfigError

__all__ = [
    "ALWAYS_FLOAT32",
    "AUTO",
    "EARLY",
    "FULL",
    "LATE",
    "LINEAR",
    "PAIRED",
    "SLIDING",
    "TAPS_AT",
    "UPSTREAM",
    "AttentionConfig",
    "DrafterConfig",
    "HybridConfig",
    "RopeConfig",
    "TargetConfig",
    "check_pair",
    "drafter_config",
    "family_of",
    "is_gguf",
    "paired",
    "read_drafter_config",
    "read_json",
    "read_target_config",
    "target_config",
    "window_kinds",
    "wrong_role",
]
DRAFTER_FIELDS = ("dflash_config", "dspark_config", "target_layer_ids", "speculators_model_type")
INSTEAD = {
    "target": "the target that the drafter was trained for, and this as its drafter",
    "drafter": "a drafter that was trained for this target, 'auto' for a published one, or none",
}


def wrong_role(where: object, needed: str) -> ConfigError:
    """Return the error about a drafter in place of a target, or the reverse.

    Args:
      needed: the role that was asked for.
    """
    [found] = INSTEAD.keys() - {needed}
    return ConfigError(f"{where} is a {found}; a {needed} is needed here: give {INSTEAD[needed]}")


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
    reader = Fields(fields, where)
    config = target_families()[model_types()[model_type]].from_hf(reader)
    reader.check_rest()
    return dataclasses.replace(
        config,
        bos_token_id=_token_id(fields, "bos_token_id", config.vocab_size),
        pad_token_id=_token_id(fields, "pad_token_id", config.vocab_size),
    )


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
        fields = fields | {"model_type": "qwen3"}  # drafters have its defaults
    outer = Fields(fields, where)
    heads = outer.inner("dspark_config")  # where SpecForge writes a part of the fields
    own = outer.inner("dflash_config")
    both = DrafterFields(outer, Fields(own.values | heads.values, own.where))
    config = drafter_kinds()[_drafter_kind(both)].from_hf(both)
    outer.check_rest()
    both.dflash.check_rest()
    return config


def _drafter_kind(fields: DrafterFields) -> str:
    where, known = fields.outer.where, drafter_architectures()
    named = fields.outer.get("architectures", ["DFlashDraftModel"])
    if not isinstance(named, list) or named not in [[name] for name in known]:
        raise ConfigError(f"{where}: architectures is {named}; expected one of {', '.join(known)}")
    kind, projectors = known[named[0]], projector_types()
    projector = fields.dflash.get("projector_type", kind)
    if kind == "dflash" and projector in tuple(projectors):
        return projectors[projector]
    if projector != kind:
        raise ConfigError(
            f"{where}: projector_type is {projector!r} in a {named[0]}; only"
            f" {', '.join(projectors)} are supported"
        )
    return kind


def check_pair(target: TargetConfig, drafter: DrafterConfig, *, taps_at: str = AUTO) -> None:
    """Check that a drafter was made for a target.

    Args:
      taps_at: where the plan takes the taps; every value but AUTO defines the output of the
        last layer.

    Raises:
      ConfigError: the two do not fit; the message lists every reason.
    """
    layers = range(target.num_layers)
    outside = [i for i in drafter.target_layer_ids if i not in layers]
    reasons = []
    if drafter.hidden_size != target.hidden_size:
        reasons.append(f"hidden size {drafter.hidden_size}, the target has {target.hidden_size}")
    if drafter.vocab_size != target.vocab_size:
        reasons.append(f"vocabulary {drafter.vocab_size}, the target has {target.vocab_size}")
    if drafter.num_target_layers not in (0, target.num_layers):
        reasons.append(
            f"made for {drafter.num_target_layers} target layers, this one has {target.num_layers}"
        )
    if outside:
        reasons.append(f"reads target layers {outside}, the target has layers 0 to {layers[-1]}")
    if target.num_layers - 1 in drafter.target_layer_ids and taps_at == AUTO:
        reasons.append(
            f"reads the last target layer ({target.num_layers - 1}), which is ambiguous: other"
            " engines take it before (taps_at='late') or after (taps_at='upstream') the final norm"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        reasons.append(
            f"mask token {drafter.mask_token_id} is outside the target's vocabulary"
            f" of {target.vocab_size}"
        )
    if reasons:
        raise ConfigError(
            "the drafter does not fit the target: " + "; ".join(reasons) + ". Load the drafter"
            " that was trained for this target"
        )


# Fields of a drafter's config that `paired` may take from the target.
PAIRED = ("input_embedding_scale", "rounded_embedding_scale", "final_logit_softcapping")


def paired(target: TargetConfig, drafter: DrafterConfig) -> DrafterConfig:
    """Return the drafter with fields that its config leaves open taken from its target.

    Drafters share the target's embedding and head, so the target's embedding scale and softcap
    are the defaults, as in every engine that serves Gemma. Drafters with their own tables have
    neither by default.
    """
    changes: dict[str, Any] = {}
    if drafter.input_embedding_scale is None:
        changes |= {
            "input_embedding_scale": 1.0 if drafter.own_embedding else target.embedding_scale,
            "rounded_embedding_scale": True,
        }
    if drafter.final_logit_softcapping is None:
        cap = None if drafter.own_head else target.final_softcap
        changes["final_logit_softcapping"] = cap or 0.0
    return dataclasses.replace(drafter, **changes)


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
