"""Mistral and Ministral: Llama with a window in all layers, in some, or in none.

GGUF files have Llama's architecture.
"""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config, switched_window
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf

SIZES = {
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "num_key_value_heads": 8,
}


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a Mistral; only Ministral's layers may differ, by `layer_types`."""
    config = dense_config(f)
    if config.model_type == "mistral" or f.get("layer_types") is None:
        windows = (switched_window(f),) * config.num_layers
        config = dataclasses.replace(config, windows=windows)
    return config


GGUF_ARCHITECTURES = {"mistral": "llama", "ministral": "llama"}
CLASSES = {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    fields = config_json.decoder_fields(config, dtype, CLASSES[config.model_type])
    del fields["use_sliding_window"]
    if config.model_type == "mistral":  # its layers are alike
        del fields["layer_types"]
    return fields


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("mistral", "ministral"),
    defaults={"mistral": SIZES, "ministral": SIZES},
    slots=llama.slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        to_gguf=llama.to_gguf,
        written=GGUF_ARCHITECTURES,
        stored=llama.gguf_stored,
        computed=llama.gguf_computed,
    ),
)
