"""Qwen2, dense: Llama with biases of queries, keys and values (`qkv_bias`)."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families.llama import UNAPPLIED, slots
from dflash_jax.converters.gguf import keys
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.names import published

__all__ = ["from_gguf", "slots", "to_gguf", "to_hf"]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "Qwen2ForCausalLM")


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen2."""
    fields.refuse_unless(UNAPPLIED)
    return geometry(fields) | {"model_type": "qwen2"}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Qwen2.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return keys.rope(config.rope)
