"""Gemma 3, the text part: norms of 1 + w around attention and MLP, two rotary embeddings.

Multimodal files nest the text fields under `text_config`, and leave out those that have their
usual values.
"""

import dataclasses
from typing import Any

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    RopeConfig,
    TargetConfig,
    all_end_ids,
    dtype_name,
    layer_count,
    layer_windows,
    text_part,
)
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import BY_LENGTH, made_for, scaled
from dflash_jax.errors import ConfigError

# Outer fields of multimodal files: configs and tokens of the vision part.
OTHER_PARTS = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
PATTERN = 6  # every sixth layer is full if the config does not say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(TargetConfig):
    """A Gemma 3 text model. The rotary embedding of the base class is of sliding layers."""

    full_rope: RopeConfig

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        cap = (f"softcap {self.final_softcap}",) if self.final_softcap else ()
        return (*super().conventions, "norms times 1 + w", *cap, "text only")

    def window_rope(self, window: int | None) -> RopeConfig:
        """Return the rotary embedding of the layers with this window."""
        return self.full_rope if window is None else self.rope


def from_hf(f: Fields) -> Gemma3Config:
    """Return the text model of a config, which may be nested in a multimodal one."""
    return text_part(f, OTHER_PARTS, _text)


def _text(f: Fields, outer: Fields) -> Gemma3Config:
    f.used.update(("model_type", "cache_implementation", "_sliding_window_pattern"))
    f.values = f.values | {"model_type": "gemma3_text"}
    f.must_be("hidden_activation", "gelu_pytorch_tanh")
    f.must_be("attn_logit_softcapping", None)
    f.must_be("use_bidirectional_attention", None, False)
    layers, head_dim = layer_count(f), integer(f, "head_dim")
    rope, full_rope = _ropes(f, head_dim)
    hidden, cap = f.integer("hidden_size"), f.number("final_logit_softcapping", 0.0)
    if (scalar := f.number("query_pre_attn_scalar", 256.0)) <= 0:
        raise ConfigError(f"{f.where}: query_pre_attn_scalar is {scalar}; expected more than 0")
    return Gemma3Config(
        model_type="gemma3_text",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=integer(f, "num_attention_heads"),
        num_kv_heads=integer(f, "num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        attention_bias=f.flag("attention_bias", False),
        rope=rope,
        full_rope=full_rope,
        vocab_size=integer(f, "vocab_size"),
        tie_embeddings=outer.flag("tie_word_embeddings", True),
        windows=_windows(f, layers),
        max_length=made_for(f),
        eos_token_ids=all_end_ids(outer, f),
        dtype=dtype_name(f if f.get("dtype", f.get("torch_dtype")) else outer),
        qk_norm=True,
        norm_after=True,
        embedding_scale=max(hidden, 0) ** 0.5,  # the config refuses negative sizes
        score_scale=scalar**-0.5,
        final_softcap=cap if cap > 0 else None,
    )


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: by `layer_types`, or all but every n-th."""
    every = f.integer("sliding_window_pattern", PATTERN)
    if every < 1:
        raise ConfigError(f"{f.where}: sliding_window_pattern is {every}; expected 1 or more")
    usual = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    read = Fields(f.values | {"layer_types": f.get("layer_types", usual)}, f.where)
    windows = tuple(window for _, window in layer_windows(read, layers))
    f.used.update(read.used)
    return windows


def _ropes(f: Fields, width: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of sliding and of full layers, in either spelling."""
    both, old = f.inner("rope_parameters"), f.inner("rope_scaling")
    local, base = f.number("rope_local_base_freq", 1e4), f.number("rope_theta", 1e6)
    sliding, full = both.inner(SLIDING), both.inner(FULL)
    both.refuse_rest()
    found = (
        scaled(sliding, f, sliding.number("rope_theta", local), width),
        scaled(full if full.values else old, f, full.number("rope_theta", base), width),
    )
    if by_length := [rope.kind for rope in found if rope.kind in BY_LENGTH]:
        raise ConfigError(
            f"{f.where}: rope type {by_length[0]!r} is not supported in a kind of layers"
        )
    return found


# Published multimodal files leave these out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
FAMILY = Family(
    config=Gemma3Config,
    from_hf=from_hf,
    any_width=True,
    model_types=("gemma3", "gemma3_text"),
    gguf=("gemma3",),
    defaults={"gemma3_text": DEFAULTS},
)
