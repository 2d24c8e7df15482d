"""Qwen2 and Qwen2.5, dense: Llama with biases of queries, keys and values."""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Qwen2; the output of attention never has a bias."""
    return dataclasses.replace(dense_config(f), attention_bias=False, qkv_bias=True)


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "Qwen2ForCausalLM")


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen2."""
    fields.refuse_unless(llama.UNAPPLIED)
    return keys.geometry(fields) | {"model_type": "qwen2"}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Qwen2.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return keys.rope(config.rope)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("qwen2",),
    defaults={
        "qwen2": {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
        }
    },
    optional_window=True,
    slots=llama.slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("qwen2",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
