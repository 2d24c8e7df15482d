"""Qwen3, dense: Llama with queries and keys normalised per head (`qk_norm`)."""

from typing import Any

from dflash_jax.config import AttentionConfig, TargetConfig
from dflash_jax.converters.families import llama
from dflash_jax.converters.families.llama import UNAPPLIED
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Keys, Slot, same


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    found = llama.slots(config)
    if not config.qk_norm:
        return found
    for i in range(config.num_layers):
        found += head_norms(config, (f"layers_{i}", "attention"), f"layers.{i}.self_attn.")
    return found


def head_norms(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the norms of queries and of keys."""
    return [same((*at, x), f"{source}{x}.weight", config.head_dim) for x in ("q_norm", "k_norm")]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "Qwen3ForCausalLM")


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3."""
    fields.refuse_unless(UNAPPLIED)
    return geometry(fields) | {"model_type": "qwen3", "attention_bias": tensors.biased(source)}


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
