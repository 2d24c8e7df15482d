"""Gemma 3, text: four norms of 1 + w a layer, which GGUF files hold with 1 added."""

from typing import Any

import numpy as np

from dflash_jax.config import FULL, SLIDING
from dflash_jax.config.fields import whole
from dflash_jax.config.gemma3 import PATTERN, Gemma3Config
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.families import llama
from dflash_jax.converters.families.qwen3 import head_norms
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.tensors import stored_name
from dflash_jax.converters.gguf.writer import BOOL, F32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Folder, Slot

NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def folder(_: Gemma3Config) -> Folder:
    """Return tensors of published folders that are not part of the text model."""
    return Folder(ignored={r"^(vision_tower|multi_modal_projector)\.": "vision: only text is run"})


def slots(config: Gemma3Config) -> list[Slot]:
    """Return every parameter of the target."""
    found = llama.layers(config, NORMS)
    for i in range(config.num_layers):
        found += head_norms(config, (f"layers_{i}", "attention"), f"layers.{i}.self_attn.")
    return found


def to_hf(config: Gemma3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone, as transformers spells it."""
    found = published.decoder_fields(config, dtype, "Gemma3ForCausalLM")
    for key in ("hidden_act", "rope_theta", "rope_scaling", "use_sliding_window"):
        del found[key]
    if found["sliding_window"] is None:  # no layer slides; the family's default is harmless
        del found["sliding_window"]
    assert config.score_scale is not None
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole(_scalar(config)),  # transformers refuses 256.0
        "final_logit_softcapping": config.final_softcap,
        "rope_parameters": {
            SLIDING: published.rope_parameters(config.rope),
            FULL: published.rope_parameters(config.full_rope),
        },
    }


def _scalar(config: Gemma3Config) -> float:
    """Return what the root of which divides scores, free of rounding if it is a whole number."""
    assert config.score_scale is not None
    exact = config.score_scale**-2
    return float(round(exact)) if round(exact) ** -0.5 == config.score_scale else exact


# GGUF
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
LAYERS_OF_27B = 62  # whose scores are divided by another root, for which files have no key
UNAPPLIED = {"logit_scale": 1.0, "embedding_scale": 1.0, "nextn_predict_layers": None}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Gemma 3."""
    fields.refuse_unless(UNAPPLIED)
    found = geometry(fields)
    layers = found["num_hidden_layers"]
    full = {"rope_theta": found.pop("rope_theta")}
    full |= found.pop("rope_scaling") or {"rope_type": "default"}
    sliding = {"rope_theta": fields.number("rope.freq_base_swa", 1e4), "rope_type": "default"}
    return found | {
        "model_type": "gemma3_text",
        "attention_bias": tensors.biased(source),
        "sliding_window": fields.count("attention.sliding_window", 1 << 24, 4096),
        "layer_types": _kinds(fields, layers),
        "query_pre_attn_scalar": _published_scalar(
            layers, found["hidden_size"], found["num_attention_heads"], found["head_dim"]
        ),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {SLIDING: sliding, FULL: full},
    }


def _kinds(fields: GgufFields, layers: int) -> list[str]:
    """Return the kind of each layer: listed, or every n-th full."""
    key = "attention.sliding_window_pattern"
    if isinstance(fields.get(key), GgufArray):
        return [SLIDING if slides else FULL for slides in fields.ints(key)]
    every = fields.count(key, 1024, PATTERN)
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _published_scalar(layers: int, hidden: int, heads: int, width: int) -> float:
    return hidden / heads if layers == LAYERS_OF_27B else float(width)


def gguf_origin(name: str, config: Gemma3Config, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; norms are 1 less."""
    stored = stored_name(name, GGUF_LAYER_NAMES)
    if stored not in shapes:
        return tensors.fused_origin(name, config, shapes)
    if name.endswith("norm.weight"):
        return Origin(stored, change="norm: 1 subtracted", values=_less_one, offset=1.0)
    return Origin(stored)


def gguf_stored(name: str, config: Gemma3Config) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    added = _plus_one if name.endswith("norm.weight") else None
    return {stored_name(name, GGUF_LAYER_NAMES): Origin(name, values=added)}


def _less_one(values: np.ndarray) -> np.ndarray:
    return values - np.float32(1)


def _plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.float32(1)


def to_gguf(config: Gemma3Config) -> keys.Metadata:
    """Return the metadata that is specific to Gemma 3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    usual = _published_scalar(
        config.num_layers, config.hidden_size, config.num_heads, config.head_dim
    )
    keys.refuse(
        config,
        {
            f"scores times {config.score_scale}": _scalar(config) != usual,
            f"the rotary embedding {config.rope.kind}": config.rope.kind != "default",
        },
    )
    found = keys.rope(config.full_rope) | {
        "rope.freq_base": Typed(F32, config.full_rope.theta),
        "rope.freq_base_swa": Typed(F32, config.rope.theta),
        "attention.sliding_window": Typed(U32, next((w for w in config.windows if w), 1)),
        "attention.sliding_window_pattern": Typed(BOOL, [w is not None for w in config.windows]),
    }
    if config.final_softcap:
        found["final_logit_softcapping"] = Typed(F32, config.final_softcap)
    return found
