"""Qwen3.5 and Qwen3.6, dense and with experts: recurrent layers and gated attention."""

import dataclasses
from typing import Any

from dflash_jax.config.base import (
    FULL,
    LINEAR,
    ExpertSizes,
    TargetConfig,
    all_end_ids,
    at_least,
    dtype_name,
    expert_sizes,
    extended,
    geometry,
    layer_types,
)
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import longest, made_for
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.slots import (
    STACKED,
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
from dflash_jax.families import llama, qwen3_5_gguf
from dflash_jax.families.entry import Family
from dflash_jax.families.qwen3 import head_norms
from dflash_jax.families.qwen3_moe import stacks

WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")

# Fields of the multimodal wrapper that do not affect text.
OTHER_INPUTS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
# Fields of training and of the multi-token prediction head, which is not loaded.
UNUSED = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "router_aux_loss_coef",
    "output_router_logits",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(TargetConfig):
    """A target whose layers are Gated DeltaNet or gated attention."""

    recurrent: tuple[bool, ...]  # per layer
    rotary_dim: int  # number of leading dimensions of a head that are rotated
    key_heads: int  # this and the next fields: of recurrent layers
    value_heads: int
    key_width: int
    value_width: int
    conv_kernel: int
    shared_expert_size: int = 0  # without experts, the MLP has intermediate_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.recurrent) != self.num_layers:
            raise ConfigError(
                f"{len(self.recurrent)} layer kinds for {self.num_layers} layers; give one each"
            )
        at_least(self, 1, "key_heads", "value_heads", "key_width", "value_width")
        at_least(self, 2, "conv_kernel")
        at_least(self, 0, "shared_expert_size")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads; the"
                " first must be a multiple of the second"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"{self.rotary_dim} of {self.head_dim} dimensions are to be rotated; expected an"
                " even number of at most all"
            )

    @property
    def conv_channels(self) -> int:
        """Total width of queries, keys and values of a recurrent layer."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Descriptions of the layers."""
        return tuple("gated delta net" if r else "gated attention" for r in self.recurrent)

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        return (
            "norms times 1 + w",
            f"{self.rotary_dim} of {self.head_dim} dimensions rotated",
            "recurrent states float32, committed token by token in exact plans",
            "text only",
        )


def from_hf(f: Fields) -> HybridConfig:
    """Return the text part of a Qwen3.5 config, which may be nested in a multimodal one.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    text = f.inner("text_config")
    if text.values:
        f.used.update(OTHER_INPUTS)
    else:
        text = f
    moe = "moe" in str(f.get("model_type"))
    reader = _plain_rope(text, moe)
    rotated = int(integer(reader, "head_dim", 256) * _partial(text))
    size = geometry(reader, rotated=rotated)
    if size.rope.kind == "proportional":
        raise ConfigError(f"{text.where}: rope type 'proportional' is not supported in Qwen3.5")
    reader.must_be("hidden_act", "silu", "swish")
    reader.must_be("attn_output_gate", True)
    reader.must_be("output_gate_type", "silu", "swish")
    reader.must_be("mamba_ssm_dtype", "float32")
    reader.used.update(UNUSED)
    experts = ExpertSizes()
    shared_size = 0
    if moe:
        experts, shared_size = _experts(reader)
    config = extended(
        size,
        HybridConfig,
        num_experts=experts.total,
        experts_per_token=experts.chosen,
        expert_size=experts.size,
        shared_expert_size=shared_size,
        model_type="qwen3_5_moe_text" if moe else "qwen3_5_text",
        vocab_size=reader.integer("vocab_size"),
        tie_embeddings=f.flag("tie_word_embeddings", False),  # the outer value counts
        max_length=longest(size.rope, made_for(reader)),
        eos_token_ids=all_end_ids(f, reader),
        dtype=dtype_name(f if text is f or "dtype" in f.values else reader),
        qk_norm=True,
        rotary_dim=rotated,
        recurrent=_kinds(reader, size.num_layers),
        key_heads=integer(reader, "linear_num_key_heads"),
        value_heads=integer(reader, "linear_num_value_heads"),
        key_width=integer(reader, "linear_key_head_dim"),
        value_width=integer(reader, "linear_value_head_dim"),
        conv_kernel=reader.integer("linear_conv_kernel_dim", 4),
    )
    reader.used.update(("model_type", "tie_word_embeddings", "dtype", "torch_dtype"))
    if text is f:
        f.used.update(reader.used)
    else:
        reader.check_rest()
    return config


def _plain_rope(text: Fields, moe: bool) -> Fields:
    """Return the fields with rotary settings reduced to those that text needs.

    The rotated part of a head is read by `_partial`.
    """
    kind = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    values = text.values | {"model_type": kind}
    for spelling in ("rope_parameters", "rope_scaling"):
        rope = dict(text.inner(spelling).values)
        rope.pop("partial_rotary_factor", None)
        values[spelling] = rope or None
    if moe:  # total width per token, which published files lack
        named = text.over(values)
        sizes = [integer(named, name) for name in ("num_experts_per_tok", *WIDTHS)]
        values["intermediate_size"] = sizes[0] * sizes[1] + sizes[2]
    values.pop("partial_rotary_factor", None)
    return text.over(values)


def _partial(text: Fields) -> float:
    """Return the rotated share of a head; a rescaled embedding uses the outer field."""
    old = text.inner("rope_scaling")
    new = text.inner("rope_parameters")
    rope = old if old.values else new
    outer = text.number("partial_rotary_factor", 0.25)
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    share = rope.number("partial_rotary_factor", outer) if plain else outer
    if not 0 <= share <= 1:
        raise ConfigError(f"{text.where}: partial_rotary_factor is {share}; expected 0 to 1")
    return share


def _kinds(f: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent: by `layer_types`, or all except every n-th."""
    if (every := f.integer("full_attention_interval", 4)) < 1:
        raise ConfigError(f"{f.where}: full_attention_interval is {every}; expected 1 or more")
    regular = [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    kinds = layer_types(f, regular, LINEAR)
    if f.values.get("full_attention_interval") is not None and kinds != regular:
        raise ConfigError(
            f"{f.where}: layer_types contradicts full_attention_interval {every}; remove the"
            " one that is wrong"
        )
    return tuple(kind == LINEAR for kind in kinds)


def _experts(f: Fields) -> tuple[ExpertSizes, int]:
    """Return the sizes of experts, and the width of the shared one.

    Every layer has experts, whose weights sum to one.
    """
    f.must_be("norm_topk_prob", True)
    f.must_be("decoder_sparse_step", 1)
    f.must_be("mlp_only_layers", [])
    size, shared = (integer(f, name) for name in WIDTHS)
    return expert_sizes(f, size), shared


_SIZES = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
OTHERS = {
    r"^visual\.": "vision: only text is run",
    r"^mtp\.": "multi-token prediction: not run",
}


def folder(_: HybridConfig) -> Folder:
    """Expect vision weights, and experts that may be stacked."""
    return Folder(ignored=OTHERS, fused=STACKED)


def slots(config: HybridConfig) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    slots = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i, recurrent in enumerate(config.recurrent):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        slots.append(same((*at, "input_norm"), f"{source}input_layernorm.weight", width))
        if recurrent:
            slots += _delta(config, (*at, "delta"), f"{source}linear_attn.")
        else:
            slots += _attention(config, (*at, "attention"), f"{source}self_attn.")
        second = _expert_slots if config.num_experts else llama.norm_and_mlp
        slots += second(config, at, source)
    return slots


def _attention(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return attention; queries and gates alternate by head, as in the stored tensor."""
    width = config.hidden_size
    groups = config.num_kv_heads
    head = config.head_dim
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv")
    count = (2 * config.num_heads // groups, 1, 1)
    slots = [
        by_head((*at, "qkv"), names, count, groups, head, width),
        linear((*at, "o"), f"{source}o_proj.weight", width, config.num_heads * head),
        *head_norms(config, at, source),
    ]
    if config.attention_bias:
        biases = tuple(f"{source}{x}_proj.bias" for x in "qkv")
        slots.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
        slots.append(same((*at, "o_bias"), f"{source}o_proj.bias", width))
    return slots


def _delta(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return a recurrent layer: the four input projections joined, the others as stored."""
    width = config.hidden_size
    heads = config.value_heads
    values = heads * config.value_width
    channels = config.conv_channels
    sizes = {"qkv": channels, "z": values, "b": heads, "a": heads}
    parts = []
    start = 0
    for name, size in sizes.items():
        select = (slice(start, start + size),)
        parts.append(TensorPart(f"{source}in_proj_{name}.weight", (size, width), (1, 0), select))
        start += size
    kernel = config.conv_kernel
    conv = TensorPart(f"{source}conv1d.weight", (channels, 1, kernel), (1, 0))
    return [
        Slot((*at, "in_proj"), (width, start), tuple(parts)),
        Slot((*at, "conv"), (kernel, channels), (conv,)),
        same((*at, "a_log"), f"{source}A_log", heads),
        same((*at, "dt_bias"), f"{source}dt_bias", heads),
        same((*at, "norm"), f"{source}norm.weight", config.value_width),
        linear((*at, "out"), f"{source}out_proj.weight", width, values),
    ]


def _expert_slots(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return the second norm, the router, the experts and the shared expert."""
    width = config.hidden_size
    size = config.expert_size
    shared = config.shared_expert_size
    count = config.num_experts
    mlp = f"{source}mlp."
    norm = f"{source}post_attention_layernorm.weight"
    both = (f"{mlp}shared_expert.gate_proj.weight", f"{mlp}shared_expert.up_proj.weight")
    at_mlp = (*at, "mlp")
    return [
        same((*at, "post_attention_norm"), norm, width),
        linear((*at_mlp, "router"), f"{mlp}gate.weight", count, width),
        *stacks(at_mlp, f"{mlp}experts.", count, size, width),
        linear((*at_mlp, "shared_gate"), f"{mlp}shared_expert_gate.weight", 1, width),
        paired((*at_mlp, "shared", "gate_up"), both, shared, width),
        linear((*at_mlp, "shared", "down"), f"{mlp}shared_expert.down_proj.weight", width, shared),
    ]


def to_hf(config: HybridConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone, as transformers spells it.

    Raises:
      ConfigError: the rotary embedding is rescaled.
    """
    if config.rope.kind != "default":
        raise ConfigError(
            f"rotary embedding rescaled by {config.rope.kind!r} is not written for Qwen3.5; export"
            " the weights before a context extension"
        )
    fields = config_json.shared_fields(config, dtype, ARCHITECTURES[config.model_type]) | {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in config.recurrent],
        "linear_num_key_heads": config.key_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.key_width,
        "linear_value_head_dim": config.value_width,
        "linear_conv_kernel_dim": config.conv_kernel,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
        },
    }
    return fields | _mlp_fields(config)


def _mlp_fields(config: HybridConfig) -> dict[str, Any]:
    if not config.num_experts:
        return {"intermediate_size": config.intermediate_size}
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_expert_size,
    }


FAMILY = Family(
    config=HybridConfig,
    from_hf=from_hf,
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    defaults={
        "qwen3_5_text": _SIZES | {"num_key_value_heads": 4},
        "qwen3_5_moe_text": _SIZES
        | {
            "num_key_value_heads": 2,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    },
    net="dflash_jax.families.qwen3_5_net",
    slots=slots,
    folder=folder,
    to_hf=to_hf,
    gguf=qwen3_5_gguf.GGUF,
)
