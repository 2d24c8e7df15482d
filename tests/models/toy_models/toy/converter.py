"""Tensor names and GGUF form of the made-up family."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import keys
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Slot, linear, same


def slots(config: TargetConfig) -> list[Slot]:
    width, inner = config.hidden_size, config.intermediate_size
    found = [*llama.tables(config), same(("norm",), "norm.weight", width)]
    for i in range(config.num_layers):
        at, source = (f"layers_{i}",), f"layers.{i}."
        second = f"{source}post_attention_layernorm.weight"
        found += [
            same((*at, "input_norm"), f"{source}input_layernorm.weight", width),
            *llama.attention(config, (*at, "attention"), f"{source}self_attn."),
            same((*at, "post_attention_norm"), second, width),
            linear((*at, "mlp", "up"), f"{source}mlp.up_proj.weight", inner, width),
            linear((*at, "mlp", "down"), f"{source}mlp.down_proj.weight", width, inner),
        ]
    return found


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    return published.decoder_fields(config, dtype, "ToyForCausalLM")


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    return geometry(fields) | {"model_type": "toy"}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    return keys.rope(config.rope)
