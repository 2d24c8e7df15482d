"""Gemma 4, the text part: dense, with experts, or with per-layer inputs.

Published files give full-attention layers their own sizes in `global_*` fields, transformers
5.15 in `per_layer_config`; multimodal files nest the text fields under `text_config`.
"""

import dataclasses
import math
from typing import Any

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    RopeConfig,
    TargetConfig,
    all_end_ids,
    at_least,
    dtype_name,
    layer_count,
    layer_types,
    text_part,
)
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import BY_LENGTH, made_for, scaled
from dflash_jax.errors import ConfigError

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
    per_layer_rows: int = 0  # of their table, if it is longer than the vocabulary

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
        found = {
            "embedding times sqrt(width)": True,
            "scores unscaled": True,
            "layer scalars": True,
            "keys as values in full layers": self.key_is_value,
            shared: self.shared_layers,
            f"per-layer inputs of {self.per_layer_size}": self.per_layer_size,
            f"softcap {self.final_softcap}": self.final_softcap,
            "text only": True,
        }
        return tuple(text for text, applies in found.items() if applies)

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
    layers, hidden = layer_count(f), f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    windows = _windows(f, layers)
    full = _full_layers(f, windows)
    head_dim = integer(f, "head_dim", 256)
    rope, full_rope = _ropes(f, head_dim, full["full_head_dim"])
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
        **_per_layer(f),
        **full,
        **_experts(f),
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
    sliding, full = both.inner(SLIDING), both.inner(FULL)
    full = Fields(full.values or FULL_ROPE, full.where)
    both.used.update((SLIDING, FULL))
    both.must_be(
        "rope_type", "default", "proportional"
    )  # written by mistake if all layers are full
    both.refuse_rest()
    found = (
        scaled(sliding, f, sliding.number("rope_theta", 1e4), width),
        scaled(full, f, full.number("rope_theta", 1e6), full_width),
    )
    if by_length := [rope.kind for rope in found if rope.kind in BY_LENGTH]:
        raise ConfigError(
            f"{f.where}: rope type {by_length[0]!r} is not supported in a kind of layers"
            " (transformers fails on it)"
        )
    # Transformers reads `truncate` outside the two objects, where it never is.
    sliding_rope, full_rope = (dataclasses.replace(rope, truncate=True) for rope in found)
    return sliding_rope, full_rope


def _kv_heads(f: Fields) -> int:
    return integer(f, "num_key_value_heads", f.integer("num_attention_heads"))


def _full_layers(f: Fields, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return sizes of full layers, in either spelling."""
    shared = f.flag("attention_k_eq_v", False)
    heads, width = _kv_heads(f), integer(f, "head_dim", 256)
    f.used.update(("global_head_dim", "num_global_key_value_heads"))
    per_layer = f.inner("per_layer_config")  # differences from sliding layers, if any
    # Layer numbers are strings, in some files with leading zeros.
    sizes = {int(i) if i.isdecimal() else i: per_layer.inner(i) for i in per_layer.values}
    if "per_layer_config" not in f.values:
        own = f.integer("num_global_key_value_heads", heads) if shared else heads
        found = {(own, f.integer("global_head_dim", 512))}
    else:
        full = [i for i, w in enumerate(windows) if w is None]
        if sizes.keys() not in (set(), {*full}) or len(sizes) != len(per_layer.values):
            raise ConfigError(
                f"{f.where}: per_layer_config names layers {[*per_layer.values]}; expected the"
                f" full-attention layers {full}"
            )
        found = {
            (s.integer("num_key_value_heads", heads), s.integer("head_dim", width))
            for s in sizes.values() or [per_layer]
        }
        for reader in sizes.values():
            reader.refuse_rest()
    if len(found) != 1:
        raise ConfigError(f"{f.where}: full layers differ in size {sorted(found)}; expected one")
    ((own, width),) = found
    return {"full_kv_heads": own, "full_head_dim": width, "key_is_value": shared}


def _experts(f: Fields) -> dict[str, Any]:
    """Return expert sizes; the width has two spellings."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
    f.used.update(names)
    if not f.get("enable_moe_block", False):
        return {}
    width = names[3] if f.values.get(names[2]) is None else names[2]
    return {
        "num_experts": f.integer("num_experts"),
        "experts_per_token": f.integer("top_k_experts"),
        "expert_size": f.integer(width),
    }


def _per_layer(f: Fields) -> dict[str, Any]:
    """Return the width of per-layer inputs, and the rows of their table."""
    size, vocab = integer(f, "hidden_size_per_layer_input", 0), f.integer("vocab_size")
    rows = integer(f, "vocab_size_per_layer_input", vocab) or vocab
    if size and rows < vocab:
        raise ConfigError(
            f"{f.where}: vocab_size_per_layer_input is {rows}; expected at least the vocabulary's"
            f" size {vocab}: other tokens would have no vectors"
        )
    return {"per_layer_size": size, "per_layer_rows": rows if size and rows != vocab else 0}


FAMILY = Family(
    config=Gemma4Config,
    from_hf=from_hf,
    any_width=True,
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    gguf=("gemma4",),
    defaults=DEFAULTS,
)
