"""Gemma 4: four norms a layer, two shapes of attention, experts, per-layer inputs."""

from typing import Any

from dflash_jax.config import FULL, SLIDING
from dflash_jax.config.gemma4 import Gemma4Config
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import gemma4 as gguf_form
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
        Slot((*at, "experts_gate_up"), (count, width, 2, size), (gate_up,)),
        Slot((*at, "experts_down"), (count, size, width), (down,)),
    ]


def _layer_vectors(config: Gemma4Config) -> list[Slot]:
    """Return the table of per-layer vectors, and the weights that combine it with the first."""
    layers, size, width = config.num_layers, config.per_layer_size, config.hidden_size
    rows = config.per_layer_rows or config.vocab_size
    table = TensorPart("embed_tokens_per_layer.weight", (rows, layers * size), (0, 1, 2))
    project = TensorPart("per_layer_model_projection.weight", (layers * size, width), (1, 2, 0))
    return [
        Slot(("layer_embed",), (rows, layers, size), (table,)),
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
from_gguf, to_gguf = gguf_form.from_gguf, gguf_form.to_gguf
gguf_origin, gguf_stored = gguf_form.gguf_origin, gguf_form.gguf_stored
gguf_computed, gguf_ignored = gguf_form.gguf_computed, gguf_form.gguf_ignored
