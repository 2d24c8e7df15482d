"""Granite, dense: the tensors of Llama, and four factors."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.families.llama import UNAPPLIED, gguf_origin, gguf_stored, slots
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.writer import F32, Typed
from dflash_jax.converters.names import published

__all__ = ["from_gguf", "gguf_origin", "gguf_stored", "slots", "to_gguf", "to_hf"]


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "GraniteForCausalLM") | {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.score_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


# GGUF
FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
OWN = {key: value for key, value in UNAPPLIED.items() if key not in FACTORS}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Granite."""
    fields.refuse_unless(OWN)
    scale = fields.number("attention.scale", 0.0)
    found = geometry(fields, scale=scale or None, applied=FACTORS)
    return found | {
        "model_type": "granite",
        "attention_bias": tensors.biased(source),
        "mlp_bias": "blk.0.ffn_gate.bias" in source.names(),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "attention_multiplier": scale or found["head_dim"] ** -0.5,
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
