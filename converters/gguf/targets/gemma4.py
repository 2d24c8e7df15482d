"""Gemma 4: kinds of layers that differ in shape, rotary divisors for the full ones."""

import re
from typing import Any

import numpy as np

from dflash_jax.config import FULL, SLIDING
from dflash_jax.config.gemma4 import Gemma4Config
from dflash_jax.converters.canonical import Below, Origin
from dflash_jax.converters.gguf.fields import Fields, geometry
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.header import GgufArray
from dflash_jax.converters.gguf.targets import experts
from dflash_jax.converters.gguf.targets.dense import Shapes
from dflash_jax.converters.names.gguf import stored_name
from dflash_jax.errors import ConfigError

ROPE_FREQS = "rope_freqs.weight"
STILL = 1e20  # a divisor this large turns nothing
UNAPPLIED = {"logit_scale": 1.0, "attention.value_scale": 1.0, "nextn_predict_layers": None}
OUTER = {
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
LAYER = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def hf_fields(fields: Fields, source: GgufFile) -> dict[str, Any]:
    """The fields of config.json that are Gemma 4's own."""
    fields.refuse_unless(UNAPPLIED)
    inner, double = _inner_sizes(fields)
    found = geometry(fields, inner=inner, kv_heads=1, scale=1.0)
    layers, present = found["num_hidden_layers"], set(source.names())
    kinds = _kinds(fields, layers)
    sizes = _heads(fields, kinds, found["head_dim"])
    shared = fields.whole("attention.shared_kv_layers", layers - 1)
    own = [i for i, kind in enumerate(kinds) if kind == FULL and i < layers - shared]
    found |= {
        "model_type": "gemma4_text",
        "num_key_value_heads": sizes[SLIDING][0],
        "head_dim": sizes[SLIDING][1],
        "per_layer_config": {
            str(i): {"num_key_value_heads": sizes[FULL][0], "head_dim": sizes[FULL][1]}
            for i, kind in enumerate(kinds)
            if kind == FULL
        },
        "intermediate_size": inner,
        "use_double_wide_mlp": double,
        "attention_k_eq_v": bool(own) and f"blk.{own[-1]}.attn_v.weight" not in present,
        "layer_types": kinds,
        "sliding_window": fields.count("attention.sliding_window", 1 << 24),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": fields.whole("embedding_length_per_layer_input", 1 << 16),
        "vocab_size_per_layer_input": None,  # the vocabulary's
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": fields.number("rope.freq_base_swa", 1e4),
            },
            FULL: _full_rope(source, found["rope_theta"], fields.where),
        },
    }
    for key in ("rope_theta", "rope_scaling"):
        del found[key]
    if not fields.get("expert_count"):
        return found
    chosen = experts.counts(fields)
    return found | {
        "enable_moe_block": True,
        "num_experts": chosen["num_experts"],
        "top_k_experts": chosen["num_experts_per_tok"],
        "moe_intermediate_size": fields.count("expert_feed_forward_length", 524288),
    }


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Which layers slide: listed, or all but every n-th; the last never does."""
    key = "attention.sliding_window_pattern"
    if isinstance(fields.get(key), GgufArray):
        listed = fields.ints(key)
    else:
        every = fields.count(key, 1024, 6)
        listed = [(i + 1) % every for i in range(layers)]
    if len(listed) != layers or listed[-1]:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.{key} is {listed[:8]}... for {layers} layers;"
            " expected one entry a layer, the last one full"
        )
    return [SLIDING if slides else FULL for slides in listed]


def _heads(fields: Fields, kinds: list[str], width: int) -> dict[str, tuple[int, int]]:
    """Key/value heads and their width, of sliding and of full layers."""
    key = "attention.head_count_kv"
    if isinstance(fields.get(key), GgufArray):
        listed = fields.ints(key)
    else:
        listed = [fields.count(key, 1024)] * len(kinds)
    widths = {FULL: width, SLIDING: fields.count("attention.key_length_swa", 1024, width)}
    found = {}
    for kind in (SLIDING, FULL):
        heads = {n for n, k in zip(listed, kinds, strict=False) if k == kind} or {listed[0]}
        if len(listed) != len(kinds) or len(heads) != 1 or not 1 <= min(heads) <= 1024:
            raise ConfigError(
                f"{fields.where}: {fields.architecture}.{key} is {listed[:8]}; expected one number"
                f" for all layers of {kind}, {len(kinds)} layers in all"
            )
        found[kind] = (heads.pop(), widths[kind])
    return found


def _inner_sizes(fields: Fields) -> tuple[int, bool]:
    """Width of the MLPs, and whether the layers that share keys have twice that."""
    if not isinstance(fields.get("feed_forward_length"), GgufArray):
        return fields.count("feed_forward_length", 524288), False
    listed = fields.ints("feed_forward_length")
    shared = fields.whole("attention.shared_kv_layers", len(listed) - 1)
    first, last = {*listed[: len(listed) - shared]}, {*listed[len(listed) - shared :]}
    size = listed[0] if listed else 0
    if first != {size} or not 1 <= size <= 524288 or not last <= {size, 2 * size} or len(last) > 1:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.feed_forward_length is {listed[:8]}; expected"
            " one number, doubled at most in the layers that share keys"
        )
    return size, last == {2 * size}


def _full_rope(source: GgufFile, theta: float, where: str) -> dict[str, Any]:
    """Full layers turn some of their pairs; divisors say which, and by how much less."""
    if ROPE_FREQS not in source.names():
        raise ConfigError(
            f"{where} has no {ROPE_FREQS}, which says how full layers rotate; convert the model"
            " again with a current llama.cpp"
        )
    divisors = source.read(ROPE_FREQS).astype(np.float64)
    turning = int((divisors < STILL).sum())
    factors = set(divisors[:turning].tolist())
    if len(factors) != 1 or not min(factors) > 0:
        raise ConfigError(
            f"{where}: {ROPE_FREQS} must hold one divisor for the first pairs and 1e30 for the rest"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": theta,
        "factor": factors.pop(),
        "partial_rotary_factor": turning / len(divisors),
    }


def origin(name: str, config: Gemma4Config, shapes: Shapes) -> Origin | None:
    """Where a canonical tensor lies; every one has the form Hugging Face gives it."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match and match[2] in LAYER:
        stored = f"blk.{match[1]}.{LAYER[match[2]]}"
    else:
        stored = OUTER[name] if name in OUTER else stored_name(name)
    apart = [stored.replace("gate_up", which) for which in ("gate", "up")]
    if stored not in shapes and shapes.keys() >= {*apart}:
        return Below(apart[0], change="gates above ups", others=(apart[1],))
    return Origin(stored) if stored in shapes else None


def ignored(name: str, config: Gemma4Config) -> str | None:
    """Why a tensor nobody asks for is not needed; None if it should not be there."""
    if name == ROPE_FREQS:
        return "its divisors became the rotary embedding of the full layers"
    match = re.fullmatch(r"blk\.(\d+)\.(attn_k|attn_v|attn_k_norm)\.weight", name)
    if match and int(match[1]) < config.num_layers and not config.own_parts(int(match[1])):
        return f"layer {match[1]} reads the keys of layer {config.source(int(match[1]))}"
    return None
