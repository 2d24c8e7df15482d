"""Gemma 4: four norms a layer, two shapes of attention, experts, per-layer inputs."""

import re
from typing import Any

import numpy as np

from dflash_jax.config import FULL, SLIDING
from dflash_jax.config.gemma4 import Gemma4Config
from dflash_jax.converters.canonical import Below, Origin
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.tensors import Shapes, stored_name
from dflash_jax.converters.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import (
    Folder,
    Keys,
    Slot,
    TensorPart,
    by_head,
    linear,
    paired,
    same,
)
from dflash_jax.errors import ConfigError

OTHER_INPUTS = r"^(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\."
NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
EXPERT_NORMS = {
    "post_dense_norm": "post_feedforward_layernorm_1",
    "pre_experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
}


def folder(config: Gemma4Config) -> Folder:
    """Return tensors of published folders that are not part of the text model."""
    found = {OTHER_INPUTS: "vision and audio: only text is run", r"^mtp\.": "not run"}
    for i in range(config.num_layers - config.shared_layers, config.num_layers):
        pattern = rf"^layers\.{i}\.self_attn\.([kv]_proj|k_norm)\."
        found[pattern] = f"layer {i} reads the keys of layer {config.source(i)}"
    return Folder(ignored=found)


def slots(config: Gemma4Config) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    found = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        found += _layer(config, i)
    if config.per_layer_size:
        found += _layer_vectors(config)
    return found


def _layer(config: Gemma4Config, i: int) -> list[Slot]:
    at, source = (f"layers_{i}",), f"layers.{i}."
    width, inner = config.hidden_size, config.mlp_size(i)
    norms = NORMS | (EXPERT_NORMS if config.num_experts else {})
    gate_up = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
    found = [same((*at, ours), f"{source}{name}.weight", width) for ours, name in norms.items()]
    found += [
        same((*at, "scalar"), f"{source}layer_scalar", 1),
        *_attention(config, i, (*at, "attention"), f"{source}self_attn."),
        paired((*at, "mlp", "gate_up"), gate_up, inner, width),
        linear((*at, "mlp", "down"), f"{source}mlp.down_proj.weight", width, inner),
    ]
    if config.num_experts:
        found += _experts(config, (*at, "routed"), source)
    if size := config.per_layer_size:
        own, norm = (*at, "per_layer"), f"{source}post_per_layer_input_norm.weight"
        found += [
            linear((*own, "gate"), f"{source}per_layer_input_gate.weight", size, width),
            linear((*own, "project"), f"{source}per_layer_projection.weight", width, size),
            same((*own, "norm"), norm, width),
        ]
    return found


def _attention(config: Gemma4Config, i: int, at: Keys, source: str) -> list[Slot]:
    """Return queries; keys, if the layer owns any; values, if they differ from the keys."""
    groups, head = config.heads(i)
    own = config.own_parts(i)
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv"[: 1 + own])
    count = (config.num_heads // groups, 1, 1)[: 1 + own]
    norms = ("q_norm", "k_norm")[: 1 + min(own, 1)]
    queries = config.num_heads * head
    found = [
        by_head((*at, "qkv"), names, count, groups, head, config.hidden_size),
        linear((*at, "o"), f"{source}o_proj.weight", config.hidden_size, queries),
        *(same((*at, x), f"{source}{x}.weight", head) for x in norms),
    ]
    if config.attention_bias:
        biases = tuple(name.removesuffix("weight") + "bias" for name in names)
        found.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
        found.append(same((*at, "o_bias"), f"{source}o_proj.bias", config.hidden_size))
    return found


def _experts(config: Gemma4Config, at: Keys, source: str) -> list[Slot]:
    """Return router and stacked experts: [E, 2F, D] with the gates first, and [E, D, F]."""
    count, size, width = config.num_experts, config.expert_size, config.hidden_size
    shape = (count, 2 * size, width)
    gate_up = TensorPart(f"{source}experts.gate_up_proj", shape, (0, 2, 3, 1))
    down = TensorPart(f"{source}experts.down_proj", (count, width, size), (0, 2, 1))
    return [
        linear((*at, "router"), f"{source}router.proj.weight", count, width),
        same((*at, "router_scale"), f"{source}router.scale", width),
        same((*at, "expert_scale"), f"{source}router.per_expert_scale", count),
        Slot((*at, "experts_gate_up"), (count, width, 2, size), (gate_up,), stack=True),
        Slot((*at, "experts_down"), (count, size, width), (down,), stack=True),
    ]


def _layer_vectors(config: Gemma4Config) -> list[Slot]:
    """Return the table of per-layer vectors, and the weights that combine it with the first."""
    layers, size, width = config.num_layers, config.per_layer_size, config.hidden_size
    rows = config.per_layer_rows or config.vocab_size
    project = TensorPart("per_layer_model_projection.weight", (layers * size, width), (1, 2, 0))
    return [
        linear(("layer_embed",), "embed_tokens_per_layer.weight", rows, layers * size),
        Slot(("layer_project",), (width, layers, size), (project,)),
        same(("layer_norm",), "per_layer_projection_norm.weight", size),
    ]


ARCHITECTURES = {
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}


def to_hf(config: Gemma4Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone, as transformers spells it."""
    found = published.shared_fields(config, dtype, ARCHITECTURES[config.model_type])
    del found["hidden_act"]
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    full = {"head_dim": config.full_head_dim, "num_key_value_heads": config.full_kv_heads}
    moe = bool(config.num_experts)
    found |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": config.intermediate_size,
        "layer_types": kinds,
        "sliding_window": next((w for w in config.windows if w is not None), None),
        "per_layer_config": {str(i): full for i, kind in enumerate(kinds) if kind == FULL},
        "rope_parameters": {
            SLIDING: published.rope_parameters(config.rope),
            FULL: published.rope_parameters(config.full_rope),
        },
        "attention_k_eq_v": config.key_is_value,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.shared_mlp_factor == 2,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.per_layer_rows or config.vocab_size,
        "final_logit_softcapping": config.final_softcap,
        "enable_moe_block": moe,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.experts_per_token or None,
        "moe_intermediate_size": config.expert_size or None,
    }
    if found["sliding_window"] is None:  # no layer slides; the family's default is harmless
        del found["sliding_window"]
    return found


# GGUF


# Gemma 4 in GGUF files: metadata, names and forms, both ways.
#
# Rotary divisors describe the full-attention layers.


ROPE_FREQS = "rope_freqs.weight"
STILL, NEVER = 1e20, 1e30  # from the first divisor on, a pair does not rotate; the usual one
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
    chosen = tensors.expert_counts(fields)
    return found | {
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


def _inner_sizes(fields: GgufFields) -> tuple[int, bool]:
    """Return the width of MLPs, and whether layers that share keys have twice that."""
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


def gguf_origin(name: str, config: Gemma4Config, shapes: Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; all have Hugging Face's form."""
    stored = _stored(name)
    separate = [stored.replace("gate_up", which) for which in ("gate", "up")]
    if stored not in shapes and shapes.keys() >= {*separate}:
        return Below(separate[0], change="gates above ups", others=(separate[1],))
    return Origin(stored) if stored in shapes else None


def gguf_ignored(name: str, config: Gemma4Config) -> str | None:
    """Return why a tensor is not needed, or None if it is unexpected."""
    if name == ROPE_FREQS:
        return "its divisors became the rotary embedding of the full layers"
    match = re.fullmatch(r"blk\.(\d+)\.(attn_k|attn_v|attn_k_norm)\.weight", name)
    if match and int(match[1]) < config.num_layers and not config.own_parts(int(match[1])):
        return f"layer {match[1]} reads the keys of layer {config.source(int(match[1]))}"
    return None


def to_gguf(config: Gemma4Config) -> keys.Metadata:
    """Return the metadata that is specific to Gemma 4.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    full, sliding = config.full_rope, [window is not None for window in config.windows]
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


def gguf_stored(name: str, config: Gemma4Config) -> dict[str, Origin]:
    """Return a canonical tensor by its stored name; all have Hugging Face's form."""
    return {_stored(name): Origin(name)}


def gguf_computed(config: Gemma4Config) -> dict[str, np.ndarray]:
    """Return the rotary divisors of full layers."""
    rope, pairs = config.full_rope, config.full_head_dim // 2
    turning = round(rope.partial_rotary_factor * pairs)
    return {ROPE_FREQS: np.array([rope.factor] * turning + [NEVER] * (pairs - turning))}
