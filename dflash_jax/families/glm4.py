"""GLM-4 (0414), dense: partly rotated heads, and norms around attention and MLP.

Gates and ups are one tensor.
"""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.config.rope import rotated_share
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.writer import U32, Typed
from dflash_jax.converters.formats.slots import Slot, TensorPart, linear
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense GLM-4.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    share = rotated_share(f, 0.5)
    config = dense_config(f)
    return dataclasses.replace(
        config,
        rms_norm_eps=f.number("rms_norm_eps", 1.5625e-07),
        qkv_bias=f.flag("attention_bias", True),
        attention_bias=False,  # the output has no bias
        norm_after=True,
        rotated=int(config.head_dim * share),
        rotated_neighbours=True,
    )


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
    width = config.hidden_size
    inner = config.intermediate_size
    both = TensorPart(f"{source}gate_up_proj.weight", (2 * inner, width), (1, 2, 0))
    return [
        Slot((*at, "gate_up"), (width, 2, inner), (both,)),
        linear((*at, "down"), f"{source}down_proj.weight", width, inner),
    ]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "Glm4ForCausalLM") | {
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
    hf_fields = keys.geometry(fields, partial=True)
    width = hf_fields["head_dim"]
    return hf_fields | {
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


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("glm4",),
    defaults={
        "glm4": {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128}
    },
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("glm4",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        layer_names=GGUF_LAYER_NAMES,
    ),
)
