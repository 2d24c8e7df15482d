"""Ministral 3 and Mistral Small 3: Llama whose queries grow with the position, text only."""

import dataclasses
import math
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config, dtype_name, id_tuple, switched_window
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.writer import F32, U32, Typed
from dflash_jax.converters.formats.slots import Folder
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf
from dflash_jax.families.mistral import SIZES

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
# Types of text models; the wrapper, mistral3, may hold either.
KIND = "ministral3"
OLDER = "mistral"
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
    config = dense_config(reader)
    if growth and config.rope.original_length < 1:
        raise ConfigError(f"{text.where}: {GROWTH} needs original_max_position_embeddings; add it")
    ends = id_tuple(f.get("eos_token_id")) + id_tuple(reader.get("eos_token_id"))
    config = dataclasses.replace(
        config,
        model_type=KIND,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-5 if kind == KIND else 1e-6),
        windows=(switched_window(reader),) * config.num_layers,
        tie_embeddings=f.flag("tie_word_embeddings", config.tie_embeddings),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        dtype=dtype_name(f if {"dtype", "torch_dtype"} & f.values.keys() else reader),
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
    values = text.values | {"model_type": kind}
    growth = 0.0
    spellings = ("rope_parameters", "rope_scaling")
    if kind == KIND and not any(values.get(spelling) for spelling in spellings):
        values["rope_parameters"] = DEFAULT_ROPE
    for spelling in spellings:
        rope = text.over(values).inner(spelling)
        growth = rope.number(GROWTH, 0.0) or growth
        own = {GROWTH, "max_position_embeddings"}  # the latter repeats the outer field
        values[spelling] = {k: v for k, v in rope.values.items() if k not in own} or None
    return growth, text.over(values)


OTHERS = {r"^(vision_tower|multi_modal_projector)\.": "vision: only text is run"}
ORIGINAL = "original_max_position_embeddings"


def folder(_: TargetConfig) -> Folder:
    """Expect vision weights."""
    return Folder(ignored=OTHERS)


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone."""
    fields = config_json.decoder_fields(config, dtype, "Ministral3ForCausalLM")
    for key in ("rope_theta", "rope_scaling", "use_sliding_window", "layer_types"):
        del fields[key]
    own = {GROWTH: config.query_growth, ORIGINAL: config.rope.original_length}
    return fields | {"rope_parameters": config_json.rope_parameters(config.rope) | own}


# GGUF
SCALE = "attention.temperature_scale"
LENGTH = "rope.scaling.original_context_length"
SHARE = "rope.scaling.yarn_log_multiplier"  # of yarn's growth that its attention factor leaves out


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Ministral 3."""
    fields.refuse_unless(llama.UNAPPLIED)
    hf_fields = keys.geometry(fields)
    growth = fields.number(SCALE, 0.0)
    scaling = hf_fields["rope_scaling"] or {"rope_type": "default"}
    if growth or fields.get(LENGTH):
        scaling[ORIGINAL] = fields.count(LENGTH, 1 << 24)
    if share := fields.number(SHARE, 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": share}
    return hf_fields | {"model_type": "ministral3", "rope_scaling": scaling | {GROWTH: growth}}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Ministral 3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    rope = config.rope
    own = {}
    if rope.kind == "yarn" and rope.attention_factor == 1:
        own[SHARE] = Typed(F32, 1.0)
        usual = 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
        rope = dataclasses.replace(rope, attention_factor=usual)
    if config.query_growth:
        own |= {
            SCALE: Typed(F32, config.query_growth),
            LENGTH: Typed(U32, rope.original_length),
        }
    return keys.rope(rope) | own


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=(KIND, "mistral3"),
    defaults={
        KIND: {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        OLDER: SIZES,
    },
    slots=llama.slots,
    folder=folder,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("mistral3",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=llama.gguf_origin,
        stored=llama.gguf_stored,
    ),
)
