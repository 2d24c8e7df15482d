"""Mistral and Ministral: the tensors of Llama, and GGUF files of its architecture."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families.llama import gguf_computed, gguf_stored, slots, to_gguf
from dflash_jax.converters.names import published

__all__ = ["GGUF_ARCHITECTURES", "gguf_computed", "gguf_stored", "slots", "to_gguf", "to_hf"]

GGUF_ARCHITECTURES = {"mistral": "llama", "ministral": "llama"}
CLASSES = {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    found = published.decoder_fields(config, dtype, CLASSES[config.model_type])
    del found["use_sliding_window"]
    if config.model_type == "mistral":  # its layers are alike
        del found["layer_types"]
    return found
