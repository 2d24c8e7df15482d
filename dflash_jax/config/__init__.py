"""What the models are: frozen descriptions of a target and of a drafter.

Hugging Face `config.json` files (as published and as transformers 5 writes them) become
configs here, one file per family. A field that is neither understood nor known to be harmless
is refused by name. This package never imports jax.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    AttentionConfig,
    RopeConfig,
    TargetConfig,
    id_tuple,
)
from dflash_jax.config.dflash import DrafterConfig, drafter_config
from dflash_jax.config.fields import Fields, read_json
from dflash_jax.errors import ConfigError

__all__ = [
    "FULL",
    "SLIDING",
    "TARGET_TYPES",
    "AttentionConfig",
    "DrafterConfig",
    "RopeConfig",
    "TargetConfig",
    "check_pair",
    "drafter_config",
    "read_drafter_config",
    "read_json",
    "read_target_config",
    "target_config",
]

# model_type of a config.json -> the file of its family, here and in models/
TARGET_TYPES = {
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}


def target_config(fields: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """The target described by a Hugging Face config; raises ConfigError for anything unknown."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in TARGET_TYPES:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(TARGET_TYPES))}"
        )
    family = importlib.import_module(f"dflash_jax.config.{TARGET_TYPES[model_type]}")
    reader = Fields(fields, where)
    config = family.from_hf(reader)
    reader.refuse_rest()
    return config


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises ConfigError, naming every reason, when the drafter was not made for this target."""
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
    if target.num_layers - 1 in drafter.target_layer_ids:
        reasons.append(
            f"reads the last target layer ({target.num_layers - 1}), which is ambiguous: other"
            " engines take it before or after the final norm"
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


def read_target_config(directory: Path) -> TargetConfig:
    """The target in a Hugging Face directory, end tokens completed from generation_config.json."""
    fields = read_json(directory / "config.json")
    fields.pop("quantization_config", None)  # how weights are stored: read by who loads them
    config = target_config(fields, str(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = id_tuple(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    ids = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return dataclasses.replace(config, eos_token_ids=ids)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """The drafter in a Hugging Face directory."""
    return drafter_config(read_json(directory / "config.json"), str(directory / "config.json"))
