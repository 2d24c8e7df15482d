"""Qwen3, dense: Llama with queries and keys normalised per head."""

import dataclasses
from typing import Any

from dflash_jax.config.base import AttentionConfig, TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.slots import Keys, Slot, same
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Qwen3."""
    f.must_be("use_qk_norm", True)
    return dataclasses.replace(dense_config(f), qk_norm=True)


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    slots = llama.slots(config)
    if not config.qk_norm:
        return slots
    for i in range(config.num_layers):
        slots += head_norms(config, (f"layers_{i}", "attention"), f"layers.{i}.self_attn.")
    return slots


def head_norms(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the norms of queries and of keys."""
    return [same((*at, x), f"{source}{x}.weight", config.head_dim) for x in ("q_norm", "k_norm")]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "Qwen3ForCausalLM")


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3."""
    fields.refuse_unless(llama.UNAPPLIED)
    return keys.geometry(fields) | {"model_type": "qwen3", "attention_bias": tensors.biased(source)}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Qwen3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(
        config,
        {
            "a sliding window": any(config.windows),
            "biases of MLPs": config.mlp_bias,
            "queries and keys that are not normalised": not config.qk_norm,
        },
    )
    return keys.rope(config.rope)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("qwen3",),
    defaults={
        "qwen3": {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
            "head_dim": 128,
        }
    },
    optional_window=True,
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("qwen3",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
