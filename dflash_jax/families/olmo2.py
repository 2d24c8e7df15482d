"""OLMo 2: norms after attention and MLP instead of before, and over all queries or keys."""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.slots import Slot, same
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of an OLMo 2."""
    return dataclasses.replace(
        dense_config(f),
        rms_norm_eps=f.number("rms_norm_eps", 1e-5),
        joint_norm=True,
        norm_before=False,
        norm_after=True,
    )


NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    slots = llama.layers(config, NORMS)
    width = config.head_dim
    heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    for i in range(config.num_layers):
        at = (f"layers_{i}", "attention")
        source = f"layers.{i}.self_attn."
        slots += [same((*at, x), f"{source}{x}.weight", n * width) for x, n in heads.items()]
    return slots


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "Olmo2ForCausalLM")


# GGUF
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to OLMo 2."""
    fields.refuse_unless(llama.UNAPPLIED)
    return keys.geometry(fields) | {"model_type": "olmo2", "attention_bias": tensors.biased(source)}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to OLMo 2.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return keys.rope(config.rope)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("olmo2",),
    defaults={"olmo2": {"max_position_embeddings": 2048}},
    net="dflash_jax.families.olmo2_net",
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("olmo2",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        layer_names=GGUF_LAYER_NAMES,
    ),
)
