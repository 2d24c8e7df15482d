"""Granite 3.x, dense: the tensors of Llama, with factors of embeddings, scores and residuals."""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.writer import F32, Typed
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Granite.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    config = dataclasses.replace(
        dense_config(f),
        mlp_bias=f.flag("mlp_bias", False),
        embedding_scale=f.number("embedding_multiplier", 1.0),
        score_scale=f.number("attention_multiplier", 1.0),
        residual_scale=f.number("residual_multiplier", 1.0),
        logit_divisor=f.number("logits_scaling", 1.0),
    )
    if config.logit_divisor <= 0:
        raise ConfigError(f"{f.where}: logits_scaling is not positive; expected more than 0")
    return config


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "GraniteForCausalLM") | {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.score_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


# GGUF
FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
OWN = {key: value for key, value in llama.UNAPPLIED.items() if key not in FACTORS}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Granite."""
    fields.refuse_unless(OWN)
    scale = fields.number("attention.scale", 0.0)
    hf_fields = keys.geometry(fields, scale=scale or None, applied=FACTORS)
    return hf_fields | {
        "model_type": "granite",
        "attention_bias": tensors.biased(source),
        "mlp_bias": "blk.0.ffn_gate.bias" in source.names(),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "attention_multiplier": scale or hf_fields["head_dim"] ** -0.5,
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Granite.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return keys.rope(config.rope) | {
        "embedding_scale": Typed(F32, config.embedding_scale),
        "attention.scale": Typed(F32, config.score_scale),
        "residual_scale": Typed(F32, config.residual_scale),
        "logit_scale": Typed(F32, config.logit_divisor),
    }


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("granite",),
    defaults={"granite": {"max_position_embeddings": 2048}},
    slots=llama.slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("granite",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=llama.gguf_origin,
        stored=llama.gguf_stored,
    ),
)
