"""A made-up family: Llama whose MLPs have one projection up and squared ReLUs."""

from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.slots import Slot, linear, same
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    return dense_config(f)


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
    return config_json.decoder_fields(config, dtype, "ToyForCausalLM")


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    return keys.geometry(fields) | {"model_type": "toy"}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    return keys.rope(config.rope)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("toy",),
    net="toy_models.toy_net",
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(architectures=("toy-lm",), from_gguf=from_gguf, to_gguf=to_gguf),
)
