"""Ministral 3 and Mistral Small 3: Llama whose queries grow with the position, text only."""

from typing import Any

from dflash_jax.config.base import TargetConfig, dense_fields, dtype_name, id_tuple, switched_window
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.errors import ConfigError

# Fields of the multimodal wrapper that do not affect text.
OTHER_INPUTS = (
    "vision_config",
    "image_token_id",
    "image_token_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)
KIND, OLDER = "ministral3", "mistral"  # of text models; the wrapper, mistral3, may hold either
GROWTH = "llama_4_scaling_beta"
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    GROWTH: 0.1,
}


def from_hf(f: Fields) -> TargetConfig:
    """Return the text part of a Ministral 3, which may be nested in a multimodal config.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    text = f.inner("text_config")
    if text.values:
        f.used.update((*OTHER_INPUTS, "model_type"))
    else:
        text = f
    default = OLDER if text.where != f.where else KIND
    text.must_be("model_type", *dict.fromkeys((default, KIND, OLDER)))
    kind = text.get("model_type", default)
    text.must_be("attention_bias", False)
    growth, reader = _rope(text, kind)
    fields = dense_fields(reader)
    if growth and fields["rope"].original_length < 1:
        raise ConfigError(f"{text.where}: {GROWTH} needs original_max_position_embeddings; add it")
    ends = id_tuple(f.get("eos_token_id")) + id_tuple(reader.get("eos_token_id"))
    config = TargetConfig(
        **fields
        | {
            "model_type": KIND,
            "rms_norm_eps": reader.number("rms_norm_eps", 1e-5 if kind == KIND else 1e-6),
            "windows": (switched_window(reader),) * fields["num_layers"],
            "tie_embeddings": f.flag("tie_word_embeddings", fields["tie_embeddings"]),
            "eos_token_ids": tuple(dict.fromkeys(ends)),
            "dtype": dtype_name(f if {"dtype", "torch_dtype"} & f.values.keys() else reader),
        },
        query_growth=growth,
    )
    reader.used.update(("dtype", "torch_dtype", "model_type"))
    if text is f:
        f.used.update(reader.used)
    else:
        reader.check_rest()
    return config


def _rope(text: Fields, kind: str) -> tuple[float, Fields]:
    """Return the growth of queries, and the fields with rotary settings that all families have."""
    values, growth = text.values | {"model_type": kind}, 0.0
    spellings = ("rope_parameters", "rope_scaling")
    if kind == KIND and not any(values.get(spelling) for spelling in spellings):
        values["rope_parameters"] = DEFAULT_ROPE
    for spelling in spellings:
        rope = Fields(values, text.where).inner(spelling)
        growth = rope.number(GROWTH, 0.0) or growth
        own = {GROWTH, "max_position_embeddings"}  # the latter repeats the outer field
        values[spelling] = {k: v for k, v in rope.values.items() if k not in own} or None
    return growth, Fields(values, text.where)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    module="llama",
    any_width=True,
    model_types=(KIND, "mistral3"),
    gguf=("mistral3",),
    defaults={
        KIND: {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    },
)
