"""GLM-4, dense: four norms a layer, and gates and ups in one tensor."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.writer import U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Slot, TensorPart, linear

NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    return llama.layers(config, NORMS, mlp=fused_mlp)


def fused_mlp(config: TargetConfig, at: tuple[str, ...], source: str) -> list[Slot]:
    """Return an MLP whose gates and ups are one tensor [2F, D], gates first."""
    width, inner = config.hidden_size, config.intermediate_size
    both = TensorPart(f"{source}gate_up_proj.weight", (2 * inner, width), (1, 2, 0))
    return [
        Slot((*at, "gate_up"), (width, 2, inner), (both,)),
        linear((*at, "down"), f"{source}down_proj.weight", width, inner),
    ]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "Glm4ForCausalLM") | {
        "attention_bias": config.qkv_bias,
        "partial_rotary_factor": config.rotated / config.head_dim,
    }


# GGUF
GGUF_LAYER_NAMES = {
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to GLM-4."""
    fields.refuse_unless(llama.UNAPPLIED)
    found = geometry(fields, partial=True)
    width = found["head_dim"]
    return found | {
        "model_type": "glm4",
        "attention_bias": tensors.biased(source),
        "partial_rotary_factor": fields.count("rope.dimension_count", width, width) / width,
    }


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to GLM-4.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    rotated = {"rope.dimension_count": Typed(U32, config.rotated)}
    return keys.rope(config.rope) | rotated
