"""Gemma 4 in GGUF files: metadata, names and forms, both ways.

Rotary divisors describe the full-attention layers.
"""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_jax.config.base import FULL, SLIDING
from dflash_jax.converters.formats.canonical import Below, Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import Shapes, stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.errors import ConfigError
from dflash_jax.families.entry import TargetGguf

if TYPE_CHECKING:
    from dflash_jax.families.gemma4 import Gemma4Config

ROPE_FREQS = "rope_freqs.weight"
STILL = 1e20  # the least divisor by which a pair does not rotate
NEVER = 1e30  # the usual one of such pairs
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


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Gemma 4."""
    fields.refuse_unless(UNAPPLIED)
    inner, double = _inner_sizes(fields)
    hf_fields = keys.geometry(fields, inner=inner, kv_heads=1, scale=1.0)
    layers = hf_fields["num_hidden_layers"]
    present = set(source.names())
    kinds = _kinds(fields, layers)
    sizes = _heads(fields, kinds, hf_fields["head_dim"])
    shared = fields.whole("attention.shared_kv_layers", layers - 1)
    own = [i for i, kind in enumerate(kinds) if kind == FULL and i < layers - shared]
    hf_fields |= {
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
            FULL: _full_rope(source, hf_fields["rope_theta"], fields.where),
        },
    }
    for key in ("rope_theta", "rope_scaling"):
        del hf_fields[key]
    if not fields.get("expert_count"):
        return hf_fields
    chosen = tensors.expert_counts(fields)
    return hf_fields | {
        "enable_moe_block": True,
        "num_experts": chosen["num_experts"],
        "top_k_experts": chosen["num_experts_per_tok"],
        "moe_intermediate_size": fields.count("expert_feed_forward_length", 524288),
    }


def _kinds(fields: GgufFields, layers: int) -> list[str]:
    """Return the kind of each layer: listed, or every n-th full; the last is always full."""
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


def _heads(fields: GgufFields, kinds: list[str], width: int) -> dict[str, tuple[int, int]]:
    """Return key/value heads and their width, for sliding and for full layers."""
    key = "attention.head_count_kv"
    if isinstance(fields.get(key), GgufArray):
        listed = fields.ints(key)
    else:
        listed = [fields.count(key, 1024)] * len(kinds)
    widths = {FULL: width, SLIDING: fields.count("attention.key_length_swa", 1024, width)}
    heads_by_kind = {}
    for kind in (SLIDING, FULL):
        heads = {n for n, k in zip(listed, kinds, strict=False) if k == kind} or {listed[0]}
        if len(listed) != len(kinds) or len(heads) != 1 or not 1 <= min(heads) <= 1024:
            raise ConfigError(
                f"{fields.where}: {fields.architecture}.{key} is {listed[:8]}; expected one number"
                f" for all layers of {kind}, {len(kinds)} layers in all"
            )
        heads_by_kind[kind] = (heads.pop(), widths[kind])
    return heads_by_kind


def _inner_sizes(fields: GgufFields) -> tuple[int, bool]:
    """Return the width of MLPs, and whether layers that share keys have twice that."""
    if not isinstance(fields.get("feed_forward_length"), GgufArray):
        return fields.count("feed_forward_length", 524288), False
    listed = fields.ints("feed_forward_length")
    shared = fields.whole("attention.shared_kv_layers", len(listed) - 1)
    first = {*listed[: len(listed) - shared]}
    last = {*listed[len(listed) - shared :]}
    size = listed[0] if listed else 0
    if first != {size} or not 1 <= size <= 524288 or not last <= {size, 2 * size} or len(last) > 1:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.feed_forward_length is {listed[:8]}; expected"
            " one number, doubled at most in the layers that share keys"
        )
    return size, last == {2 * size}


def _full_rope(source: GgufFile, theta: float, where: str) -> dict[str, Any]:
    """Return the rotary embedding of full layers, which rotates some pairs, from divisors."""
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


def _stored(name: str) -> str:
    """Return the stored name of a canonical tensor."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match and match[2] in LAYER:
        return f"blk.{match[1]}.{LAYER[match[2]]}"
    return OUTER[name] if name in OUTER else stored_name(name)


def gguf_origin(name: str, config: "Gemma4Config", shapes: Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; all have Hugging Face's form."""
    stored = _stored(name)
    separate = [stored.replace("gate_up", which) for which in ("gate", "up")]
    if stored not in shapes and shapes.keys() >= {*separate}:
        return Below(separate[0], change="gates above ups", others=(separate[1],))
    return Origin(stored) if stored in shapes else None


def gguf_ignored(name: str, config: "Gemma4Config") -> str | None:
    """Return why a tensor is not needed, or None if it is unexpected."""
    if name == ROPE_FREQS:
        return "its divisors became the rotary embedding of the full layers"
    match = re.fullmatch(r"blk\.(\d+)\.(attn_k|attn_v|attn_k_norm)\.weight", name)
    if match and int(match[1]) < config.num_layers and not config.own_parts(int(match[1])):
        return f"layer {match[1]} reads the keys of layer {config.source(int(match[1]))}"
    return None


def to_gguf(config: "Gemma4Config") -> keys.Metadata:
    """Return the metadata that is specific to Gemma 4.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    full = config.full_rope
    sliding = [window is not None for window in config.windows]
    keys.refuse(
        config,
        {
            "biases of attention": config.attention_bias,
            f"the rotary embedding {config.rope.kind}": config.rope.kind != "default",
            f"the rotary embedding {full.kind} of full layers": full.kind != "proportional",
            "per-layer vectors beyond the vocabulary": bool(config.per_layer_rows),
        },
    )
    layers = range(config.num_layers)
    inner = [config.mlp_size(i) for i in layers]
    window = next((w for w in config.windows if w is not None), 1)
    own = {
        "feed_forward_length": Typed(I32, inner),
        "attention.head_count_kv": Typed(I32, [config.heads(i)[0] for i in layers]),
        "attention.key_length": Typed(U32, config.full_head_dim),
        "attention.value_length": Typed(U32, config.full_head_dim),
        "attention.key_length_swa": Typed(U32, config.head_dim),
        "attention.value_length_swa": Typed(U32, config.head_dim),
        "attention.sliding_window": Typed(U32, window),
        "attention.sliding_window_pattern": Typed(BOOL, sliding),
        "attention.shared_kv_layers": Typed(U32, config.shared_layers),
        "embedding_length_per_layer_input": Typed(U32, config.per_layer_size),
        "rope.freq_base": Typed(F32, full.theta),
        "rope.freq_base_swa": Typed(F32, config.rope.theta),
        "rope.dimension_count": Typed(U32, config.full_head_dim),
        "rope.dimension_count_swa": Typed(U32, config.head_dim),
    }
    if len({*inner}) == 1:
        own["feed_forward_length"] = Typed(U32, inner[0])
    if config.final_softcap:
        own["final_logit_softcapping"] = Typed(F32, config.final_softcap)
    return own | (keys.experts(config) if config.num_experts else {})


def gguf_stored(name: str, config: "Gemma4Config") -> dict[str, Origin]:
    """Return a canonical tensor by its stored name; all have Hugging Face's form."""
    return {_stored(name): Origin(name)}


def gguf_computed(config: "Gemma4Config") -> dict[str, np.ndarray]:
    """Return the rotary divisors of full layers."""
    rope = config.full_rope
    pairs = config.full_head_dim // 2
    turning = round(rope.partial_rotary_factor * pairs)
    return {ROPE_FREQS: np.array([rope.factor] * turning + [NEVER] * (pairs - turning))}


GGUF = TargetGguf(
    architectures=("gemma4",),
    from_gguf=from_gguf,
    to_gguf=to_gguf,
    origin=gguf_origin,
    stored=gguf_stored,
    computed=gguf_computed,
    ignored=gguf_ignored,
)
