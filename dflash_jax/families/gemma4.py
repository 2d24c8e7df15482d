"""Gemma 4, the text part: dense, with experts, or with per-layer inputs.

Published files give full-attention layers their own sizes in `global_*` fields, transformers
5.15 in `per_layer_config`; multimodal files nest the text fields under `text_config`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    ExpertSizes,
    RopeConfig,
    TargetConfig,
    all_end_ids,
    at_least,
    dtype_name,
    layer_count,
    layer_types,
    text_part,
)
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import BY_LENGTH, made_for, scaled
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.slots import (
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
from dflash_jax.families import gemma4_gguf, llama
from dflash_jax.families.entry import Family

# Outer fields of multimodal files: configs and tokens of the vision and audio parts.
OTHER_PARTS = (
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_soft_tokens_per_image",
)
# Fields of early exports that the model does not use.
UNREAD = (
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "routed_layer_pattern",
    "stream_and_decode_in_f32",
)
_SIZES = {"num_key_value_heads": 4, "head_dim": 256}
DEFAULTS = {
    "gemma4_text": _SIZES
    | {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": _SIZES | {"max_position_embeddings": 262144, "sliding_window": 1024},
}
PATTERN = 6  # every sixth layer is full if the config has no layer_types
# The rotary embedding of full layers, if a config has none.
FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(TargetConfig):
    """A Gemma 4 text model. Heads, head_dim and rope of the base class are of sliding layers."""

    full_kv_heads: int
    full_head_dim: int
    full_rope: RopeConfig
    key_is_value: bool = False  # full layers: values are the raw keys, normed
    shared_layers: int = 0  # number of last layers that read an earlier layer's keys and values
    shared_mlp_factor: int = 1  # width of those layers' MLPs, relative to the others
    per_layer_size: int = 0  # width of the per-layer inputs; 0 is none
    per_layer_rows: int = 0  # rows of their table, if it is longer than the vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "per_layer_size")
        sizes = self.full_kv_heads > 0 and self.full_head_dim > 0
        if not sizes or self.num_heads % self.full_kv_heads or self.full_head_dim % 2:
            raise ConfigError(
                f"{self.num_heads} heads cannot share {self.full_kv_heads} key/value heads of"
                f" width {self.full_head_dim} in full layers; expected a divisor and an even width"
            )
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"top_k_experts is {self.experts_per_token}; expected 1 to {self.num_experts}"
            )
        if self.shared_layers:
            owners = self.windows[: self.num_layers - self.shared_layers]
            orphans = [i for i, w in enumerate(self.windows) if w not in owners]
            if not 0 <= self.shared_layers < self.num_layers or orphans:
                raise ConfigError(
                    f"num_kv_shared_layers is {self.shared_layers}, but layers {orphans} have no"
                    " earlier layer of their kind that keeps keys"
                )

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        shared = f"the last {self.shared_layers} layers read earlier keys"
        applies_by_text = {
            "embedding times sqrt(width)": True,
            "scores unscaled": True,
            "layer scalars": True,
            "keys as values in full layers": self.key_is_value,
            shared: self.shared_layers,
            f"per-layer inputs of {self.per_layer_size}": self.per_layer_size,
            f"softcap {self.final_softcap}": self.final_softcap,
            "text only": True,
        }
        return tuple(text for text, applies in applies_by_text.items() if applies)

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        owners = self.num_layers - self.shared_layers
        if layer < owners:
            return layer
        return max(i for i in range(owners) if self.windows[i] == self.windows[layer])

    def heads(self, layer: int) -> tuple[int, int]:
        """Return key/value heads and head width of a layer."""
        if self.windows[layer] is None:
            return self.full_kv_heads, self.full_head_dim
        return self.num_kv_heads, self.head_dim

    def own_parts(self, layer: int) -> int:
        """Return the projections besides queries: 2 (key and value), 1 (key only) or 0."""
        if self.source(layer) != layer:
            return 0
        return 1 if self.key_is_value and self.windows[layer] is None else 2

    def mlp_size(self, layer: int) -> int:
        """Return the width of a layer's dense MLP."""
        shares = layer >= self.num_layers - self.shared_layers
        return self.intermediate_size * (self.shared_mlp_factor if shares else 1)


def from_hf(f: Fields) -> Gemma4Config:
    """Return the text model of a config, which may be nested in a multimodal one."""
    return text_part(f, OTHER_PARTS, _text)


def _text(f: Fields, outer: Fields) -> Gemma4Config:
    unified = "unified" in str(outer.get("model_type"))
    kind = "gemma4_unified_text" if unified else "gemma4_text"
    f.used.add("model_type")
    f.values = f.values | {"model_type": kind}
    f.must_be("hidden_activation", "gelu_pytorch_tanh")
    f.must_be("use_bidirectional_attention", None, "vision")  # affects image tokens only
    f.used.update(UNREAD)
    layers = layer_count(f)
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    windows = _windows(f, layers)
    full = _full_layers(f, windows)
    experts = _experts(f)
    per_layer_size, per_layer_rows = _per_layer(f)
    head_dim = integer(f, "head_dim", 256)
    rope, full_rope = _ropes(f, head_dim, full.head_dim)
    double = f.flag("use_double_wide_mlp", False)
    cap = f.number("final_logit_softcapping", 0.0)
    return Gemma4Config(
        model_type=kind,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(f),
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        attention_bias=f.flag("attention_bias", False),
        rope=rope,
        full_rope=full_rope,
        vocab_size=f.integer("vocab_size"),
        tie_embeddings=outer.flag("tie_word_embeddings", True),
        windows=windows,
        max_length=made_for(f) or 131072,
        eos_token_ids=all_end_ids(outer, f),
        dtype=dtype_name(f if f.get("dtype") else outer),
        qk_norm=True,
        embedding_scale=math.sqrt(max(hidden, 0)),  # the config refuses negative sizes
        final_softcap=cap if cap > 0 else None,
        shared_layers=f.integer("num_kv_shared_layers", 0),
        shared_mlp_factor=2 if double else 1,
        per_layer_size=per_layer_size,
        per_layer_rows=per_layer_rows,
        full_kv_heads=full.kv_heads,
        full_head_dim=full.head_dim,
        key_is_value=full.key_is_value,
        num_experts=experts.total,
        experts_per_token=experts.chosen,
        expert_size=experts.size,
    )


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; the last layer is always full."""
    usual = DEFAULTS[f.values["model_type"]]["sliding_window"]
    window = integer(f, "sliding_window", usual)
    if window < 1:
        raise ConfigError(f"{f.where}: sliding_window is {window}; expected a positive integer")
    kinds = layer_types(f, [SLIDING if (i + 1) % PATTERN else FULL for i in range(layers)])
    return tuple(window if kind == SLIDING else None for kind in [*kinds[:-1], FULL])


def _ropes(f: Fields, width: int, full_width: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of sliding and of full layers, of these head widths."""
    both = f.inner("rope_parameters")
    sliding = both.inner(SLIDING)
    full = both.inner(FULL)
    full = full.over(full.values or FULL_ROPE)
    both.used.update((SLIDING, FULL))
    both.must_be(
        "rope_type", "default", "proportional"
    )  # written by mistake if all layers are full
    both.refuse_rest()
    ropes = (
        scaled(sliding, f, sliding.number("rope_theta", 1e4), width),
        scaled(full, f, full.number("rope_theta", 1e6), full_width),
    )
    if by_length := [rope.kind for rope in ropes if rope.kind in BY_LENGTH]:
        raise ConfigError(
            f"{f.where}: rope type {by_length[0]!r} is not supported in a kind of layers"
            " (transformers fails on it)"
        )
    # Transformers reads `truncate` outside the two objects, where it never is.
    sliding_rope, full_rope = (dataclasses.replace(rope, truncate=True) for rope in ropes)
    return sliding_rope, full_rope


def _kv_heads(f: Fields) -> int:
    return integer(f, "num_key_value_heads", f.integer("num_attention_heads"))


class _FullLayers(NamedTuple):
    """Sizes of full layers, and whether their values are the raw keys."""

    kv_heads: int
    head_dim: int
    key_is_value: bool


def _full_layers(f: Fields, windows: tuple[int | None, ...]) -> _FullLayers:
    """Return sizes of full layers, in either spelling."""
    shared = f.flag("attention_k_eq_v", False)
    heads = _kv_heads(f)
    width = integer(f, "head_dim", 256)
    f.used.update(("global_head_dim", "num_global_key_value_heads"))
    per_layer = f.inner("per_layer_config")  # differences from sliding layers, if any
    # Layer numbers are strings, in some files with leading zeros.
    sizes = {int(i) if i.isdecimal() else i: per_layer.inner(i) for i in per_layer.values}
    if "per_layer_config" not in f.values:
        own = f.integer("num_global_key_value_heads", heads) if shared else heads
        distinct_sizes = {(own, f.integer("global_head_dim", 512))}
    else:
        full = [i for i, w in enumerate(windows) if w is None]
        if sizes.keys() not in (set(), {*full}) or len(sizes) != len(per_layer.values):
            raise ConfigError(
                f"{f.where}: per_layer_config names layers {[*per_layer.values]}; expected the"
                f" full-attention layers {full}"
            )
        distinct_sizes = {
            (s.integer("num_key_value_heads", heads), s.integer("head_dim", width))
            for s in sizes.values() or [per_layer]
        }
        for reader in sizes.values():
            reader.refuse_rest()
    if len(distinct_sizes) != 1:
        raise ConfigError(
            f"{f.where}: full layers differ in size {sorted(distinct_sizes)}; expected one"
        )
    ((own, width),) = distinct_sizes
    return _FullLayers(own, width, shared)


def _experts(f: Fields) -> ExpertSizes:
    """Return expert sizes; the width has two spellings."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
    f.used.update(names)
    if not f.get("enable_moe_block", False):
        return ExpertSizes()
    width = names[3] if f.values.get(names[2]) is None else names[2]
    return ExpertSizes(
        total=f.integer("num_experts"),
        chosen=f.integer("top_k_experts"),
        size=f.integer(width),
    )


def _per_layer(f: Fields) -> tuple[int, int]:
    """Return the width of per-layer inputs, and the rows of their table."""
    size = integer(f, "hidden_size_per_layer_input", 0)
    vocab = f.integer("vocab_size")
    rows = integer(f, "vocab_size_per_layer_input", vocab) or vocab
    if size and rows < vocab:
        raise ConfigError(
            f"{f.where}: vocab_size_per_layer_input is {rows}; expected at least the vocabulary's"
            f" size {vocab}: other tokens would have no vectors"
        )
    return size, rows if size and rows != vocab else 0


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
    reasons = {OTHER_INPUTS: "vision and audio: only text is run", r"^mtp\.": "not run"}
    for i in range(config.num_layers - config.shared_layers, config.num_layers):
        pattern = rf"^layers\.{i}\.self_attn\.([kv]_proj|k_norm)\."
        reasons[pattern] = f"layer {i} reads the keys of layer {config.source(i)}"
    return Folder(ignored=reasons)


def slots(config: Gemma4Config) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    slots = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        slots += _layer(config, i)
    if config.per_layer_size:
        slots += _layer_vectors(config)
    return slots


def _layer(config: Gemma4Config, i: int) -> list[Slot]:
    at = (f"layers_{i}",)
    source = f"layers.{i}."
    width = config.hidden_size
    inner = config.mlp_size(i)
    norms = NORMS | (EXPERT_NORMS if config.num_experts else {})
    gate_up = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
    slots = [same((*at, ours), f"{source}{name}.weight", width) for ours, name in norms.items()]
    slots += [
        same((*at, "scalar"), f"{source}layer_scalar", 1),
        *_attention(config, i, (*at, "attention"), f"{source}self_attn."),
        paired((*at, "mlp", "gate_up"), gate_up, inner, width),
        linear((*at, "mlp", "down"), f"{source}mlp.down_proj.weight", width, inner),
    ]
    if config.num_experts:
        slots += _expert_slots(config, (*at, "routed"), source)
    if size := config.per_layer_size:
        own = (*at, "per_layer")
        norm = f"{source}post_per_layer_input_norm.weight"
        slots += [
            linear((*own, "gate"), f"{source}per_layer_input_gate.weight", size, width),
            linear((*own, "project"), f"{source}per_layer_projection.weight", width, size),
            same((*own, "norm"), norm, width),
        ]
    return slots


def _attention(config: Gemma4Config, i: int, at: Keys, source: str) -> list[Slot]:
    """Return queries; keys, if the layer owns any; values, if they differ from the keys."""
    groups, head = config.heads(i)
    own = config.own_parts(i)
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv"[: 1 + own])
    count = (config.num_heads // groups, 1, 1)[: 1 + own]
    norms = ("q_norm", "k_norm")[: 1 + min(own, 1)]
    queries = config.num_heads * head
    slots = [
        by_head((*at, "qkv"), names, count, groups, head, config.hidden_size),
        linear((*at, "o"), f"{source}o_proj.weight", config.hidden_size, queries),
        *(same((*at, x), f"{source}{x}.weight", head) for x in norms),
    ]
    if config.attention_bias:
        biases = tuple(name.removesuffix("weight") + "bias" for name in names)
        slots.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
        slots.append(same((*at, "o_bias"), f"{source}o_proj.bias", config.hidden_size))
    return slots


def _expert_slots(config: Gemma4Config, at: Keys, source: str) -> list[Slot]:
    """Return router and stacked experts: [E, 2F, D] with the gates first, and [E, D, F]."""
    count = config.num_experts
    size = config.expert_size
    width = config.hidden_size
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
    layers = config.num_layers
    size = config.per_layer_size
    width = config.hidden_size
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
    fields = config_json.shared_fields(config, dtype, ARCHITECTURES[config.model_type])
    del fields["hidden_act"]
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    full = {"head_dim": config.full_head_dim, "num_key_value_heads": config.full_kv_heads}
    moe = bool(config.num_experts)
    fields |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": config.intermediate_size,
        "layer_types": kinds,
        "sliding_window": next((w for w in config.windows if w is not None), None),
        "per_layer_config": {str(i): full for i, kind in enumerate(kinds) if kind == FULL},
        "rope_parameters": {
            SLIDING: config_json.rope_parameters(config.rope),
            FULL: config_json.rope_parameters(config.full_rope),
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
    if fields["sliding_window"] is None:  # no layer slides; the family's default is harmless
        del fields["sliding_window"]
    return fields


FAMILY = Family(
    config=Gemma4Config,
    from_hf=from_hf,
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    defaults=DEFAULTS,
    net="dflash_jax.families.gemma4_net",
    slots=slots,
    folder=folder,
    to_hf=to_hf,
    gguf=gemma4_gguf.GGUF,
)
