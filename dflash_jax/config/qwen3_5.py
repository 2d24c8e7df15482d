"""Qwen3.5 and Qwen3.6, dense and with experts: recurrent layers and gated attention."""

import dataclasses
from typing import Any

from dflash_jax.config.base import (
    FULL,
    TargetConfig,
    all_end_ids,
    at_least,
    dtype_name,
    expert_fields,
    geometry,
    layer_types,
)
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import longest, made_for
from dflash_jax.errors import ConfigError

LINEAR = "linear_attention"
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
    if size["rope"].kind == "proportional":
        raise ConfigError(f"{text.where}: rope type 'proportional' is not supported in Qwen3.5")
    reader.must_be("hidden_act", "silu", "swish")
    reader.must_be("attn_output_gate", True)
    reader.must_be("output_gate_type", "silu", "swish")
    reader.must_be("mamba_ssm_dtype", "float32")
    reader.used.update(UNUSED)
    experts = _experts(reader) if moe else {}
    config = HybridConfig(
        **size,
        **experts,
        model_type="qwen3_5_moe_text" if moe else "qwen3_5_text",
        vocab_size=reader.integer("vocab_size"),
        tie_embeddings=f.flag("tie_word_embeddings", False),  # the outer value counts
        max_length=longest(size["rope"], made_for(reader)),
        eos_token_ids=all_end_ids(f, reader),
        dtype=dtype_name(f if text is f or "dtype" in f.values else reader),
        qk_norm=True,
        rotary_dim=rotated,
        recurrent=_kinds(reader, size["num_layers"]),
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
        named = Fields(values, text.where)
        sizes = [integer(named, name) for name in ("num_experts_per_tok", *WIDTHS)]
        values["intermediate_size"] = sizes[0] * sizes[1] + sizes[2]
    values.pop("partial_rotary_factor", None)
    return Fields(values, text.where)


def _partial(text: Fields) -> float:
    """Return the rotated share of a head; a rescaled embedding uses the outer field."""
    old, new = text.inner("rope_scaling"), text.inner("rope_parameters")
    rope, outer = old if old.values else new, text.number("partial_rotary_factor", 0.25)
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


def _experts(f: Fields) -> dict[str, Any]:
    """Return expert sizes; every layer has experts, whose weights sum to one."""
    f.must_be("norm_topk_prob", True)
    f.must_be("decoder_sparse_step", 1)
    f.must_be("mlp_only_layers", [])
    size, shared = (integer(f, name) for name in WIDTHS)
    return expert_fields(f, size) | {"shared_expert_size": shared}


_SIZES = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FAMILY = Family(
    config=HybridConfig,
    from_hf=from_hf,
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    gguf=("qwen35", "qwen35moe"),
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
)
