"""Gemma 4: four norms a layer, kinds of attention that differ in shape, experts, layer inputs."""

from dflash_jax.config.gemma4 import Gemma4Config
from dflash_jax.converters.names import llama
from dflash_jax.converters.names.slots import (
    Folder,
    Part,
    Path,
    Slot,
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
    """What published folders hold besides the text model."""
    found = {OTHER_INPUTS: "vision and audio: only text is run", r"^mtp\.": "not run"}
    for i in range(config.num_layers - config.shared_layers, config.num_layers):
        pattern = rf"^layers\.{i}\.self_attn\.([kv]_proj|k_norm)\."
        found[pattern] = f"layer {i} reads the keys of layer {config.source(i)}"
    return Folder(ignored=found)


def slots(config: Gemma4Config) -> list[Slot]:
    """Every parameter of the target."""
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


def _attention(config: Gemma4Config, i: int, at: Path, source: str) -> list[Slot]:
    """Queries; keys where the layer owns some; values where they are not the keys."""
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


def _experts(config: Gemma4Config, at: Path, source: str) -> list[Slot]:
    """Router and experts, stacked: [E, 2F, D] with the gates first, and [E, D, F]."""
    count, size, width = config.num_experts, config.expert_size, config.hidden_size
    shape = (count, 2 * size, width)
    gate_up = Part(f"{source}experts.gate_up_proj", shape, (0, 2, 3, 1))
    down = Part(f"{source}experts.down_proj", (count, width, size), (0, 2, 1))
    return [
        linear((*at, "router"), f"{source}router.proj.weight", count, width),
        same((*at, "router_scale"), f"{source}router.scale", width),
        same((*at, "expert_scale"), f"{source}router.per_expert_scale", count),
        Slot((*at, "experts_gate_up"), (count, width, 2, size), (gate_up,)),
        Slot((*at, "experts_down"), (count, size, width), (down,)),
    ]


def _layer_vectors(config: Gemma4Config) -> list[Slot]:
    """The second embedding table, a vector for every layer, and what joins it to the first."""
    layers, size, width = config.num_layers, config.per_layer_size, config.hidden_size
    rows = config.per_layer_rows or config.vocab_size
    table = Part("embed_tokens_per_layer.weight", (rows, layers * size), (0, 1, 2))
    project = Part("per_layer_model_projection.weight", (layers * size, width), (1, 2, 0))
    return [
        Slot(("layer_embed",), (rows, layers, size), (table,)),
        Slot(("layer_project",), (width, layers, size), (project,)),
        same(("layer_norm",), "per_layer_projection_norm.weight", size),
    ]
