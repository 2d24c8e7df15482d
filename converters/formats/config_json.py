"""The fields of config.json files that families share, as other engines spell them."""

from typing import Any

from dflash_jax.config import FULL, SLIDING, AttentionConfig, RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError


def decoder_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that decoders without recurrent layers share."""
    fields = shared_fields(config, dtype, architecture) | geometry_fields(config)
    if config.mlp_bias:
        fields["mlp_bias"] = True
    windows = config.windows or (None,) * config.num_layers
    return fields | window_fields(windows, [w is not None for w in windows])


def shared_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that all exported targets share."""
    return _sizes(config) | {
        "architectures": [architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_length,
        "eos_token_id": list(config.eos_token_ids) or None,  # no list may be empty
        # Null, not absent: the default of a family may lie outside a small vocabulary.
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": dtype,
    }


def window_fields(windows: tuple[int | None, ...], sliding: list[bool]) -> dict[str, Any]:
    """Return the windows of layers.

    Raises:
      ConfigError: they differ.
    """
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"windows {sorted(sizes)} differ; published files know one for all layers"
        )
    return {
        "layer_types": [SLIDING if s else FULL for s in sliding],
        "use_sliding_window": bool(sizes),
        "sliding_window": next(iter(sizes), None),
    }


def geometry_fields(config: AttentionConfig) -> dict[str, Any]:
    """Return the sizes of a decoder and its rotary embedding."""
    return _sizes(config) | {
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling(config.rope),
    }


def _sizes(config: AttentionConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
    }


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Return a rotary embedding in the spelling that holds its base as well."""
    return {"rope_theta": rope.theta} | (scaling(rope) or {"rope_type": "default"})


def scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the scaling of a rotary embedding as config.json spells it, or None."""
    if rope.kind == "default":
        return None
    if rope.kind == "proportional":
        proportional: dict[str, Any] = {
            "rope_type": rope.kind,
            "partial_rotary_factor": rope.partial_rotary_factor,
        }
        if rope.factor != 1:
            proportional["factor"] = rope.factor
        return proportional
    fields: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_length:
        fields["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        keys = ("low_freq_factor", "high_freq_factor")
    elif rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "truncate", "attention_factor")
    elif rope.kind == "longrope":
        keys = ("attention_factor",)
        fields["short_factor"] = list(rope.short_factors)
        fields["long_factor"] = list(rope.long_factors)
    else:
        keys = ()
    return fields | {key: getattr(rope, key) for key in keys}
