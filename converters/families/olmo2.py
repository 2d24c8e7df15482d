"""OLMo 2: norms of all queries and of all keys, and after attention and MLP."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Slot, same

NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    found, width = llama.layers(config, NORMS), config.head_dim
    heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    for i in range(config.num_layers):
        at, source = (f"layers_{i}", "attention"), f"layers.{i}.self_attn."
        found += [same((*at, x), f"{source}{x}.weight", n * width) for x, n in heads.items()]
    return found


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "Olmo2ForCausalLM")


# GGUF
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to OLMo 2."""
    fields.refuse_unless(llama.UNAPPLIED)
    return geometry(fields) | {"model_type": "olmo2", "attention_bias": tensors.biased(source)}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to OLMo 2.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return keys.rope(config.rope)
