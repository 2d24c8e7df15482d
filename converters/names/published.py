"""Write configurations as config.json files for other engines."""

from typing import Any

from dflash_jax.config import (
    FULL,
    SLIDING,
    AttentionConfig,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.config.family import drafter_kinds, family_of
from dflash_jax.converters import families
from dflash_jax.errors import ConfigError


def fields(config: AttentionConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target or of a z-lab drafter whose weights are of `dtype`.

    Raises:
      ConfigError: others have no form for this model.
    """
    kinds = drafter_kinds()
    if isinstance(config, DrafterConfig):
        if config.kind not in kinds or config.draft_vocab_size:
            raise ConfigError(
                f"a {config.kind} drafter with a vocabulary of {config.choices} has no published"
                f" form; {', '.join(kinds)} over the whole vocabulary have"
            )
        return drafter_fields(config, dtype)
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{type(config).__name__} has no published form; targets and drafters do")
    to_hf = families.provided(family_of(config.model_type), "to_hf")
    if to_hf is None:
        raise ConfigError(
            f"a {config.model_type} target cannot be exported;"
            f" {', '.join(families.providing('to_hf'))} can."
            " Its published folder is the form others read; `convert --to orbax` keeps it for"
            " dflash_jax"
        )
    return to_hf(config, dtype)


def decoder_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that decoders without recurrent layers share."""
    found = shared_fields(config, dtype, architecture) | _geometry(config)
    if config.mlp_bias:
        found["mlp_bias"] = True
    windows = config.windows or (None,) * config.num_layers
    return found | _windows(windows, [w is not None for w in windows])


def shared_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that all exported targets share."""
    return _sizes(config) | {
        "architectures": [architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_length,
        "eos_token_id": list(config.eos_token_ids) or None,  # no list may be empty
        "dtype": dtype,
    }


def drafter_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a z-lab drafter, without its reduced vocabulary."""
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, None),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
    }
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    own |= {key: value for key, (value, default) in optional.items() if value != default}
    if config.sample_from_anchor != type(config).sample_from_anchor:  # the kind's default
        own["sample_from_anchor"] = config.sample_from_anchor
    if config.speculative_tokens:
        own["speculative_tokens"] = config.speculative_tokens
    own |= families.provided(config.kind, "to_hf")(config)
    found = _geometry(config) | {
        "architectures": [drafter_kinds()[config.kind].architectures[0]],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": dtype,
    }
    if config.rope.original_length:
        found["max_position_embeddings"] = config.rope.original_length
    return found | _causality(config)


def _causality(config: DrafterConfig) -> dict[str, Any]:
    """Return layer kinds, and `is_causal` if it differs from what the kinds imply."""
    sliding = [window is not None for window in config.windows]
    if not any(sliding) and len(set(config.causal)) > 1:
        sliding = list(config.causal)  # a sliding layer is causal even without a window
    found = _windows(config.windows, sliding)
    if list(config.causal) == sliding:
        return found
    if len(set(config.causal)) > 1:
        raise ConfigError(
            f"the layers' causality {list(config.causal)} cannot be written: published files"
            " know one value for all, or sliding layers causal and the others not"
        )
    return found | {"is_causal": config.causal[0]}


def _windows(windows: tuple[int | None, ...], sliding: list[bool]) -> dict[str, Any]:
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


def _geometry(config: AttentionConfig) -> dict[str, Any]:
    return _sizes(config) | {
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config.rope),
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
    return {"rope_theta": rope.theta} | (_scaling(rope) or {"rope_type": "default"})


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "proportional":
        share = {"partial_rotary_factor": rope.partial_rotary_factor}
        return (
            {"rope_type": rope.kind} | share | ({} if rope.factor == 1 else {"factor": rope.factor})
        )
    found: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_length:
        found["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        keys = ("low_freq_factor", "high_freq_factor")
    elif rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "truncate", "attention_factor")
    elif rope.kind == "longrope":
        keys = ("attention_factor",)
        found |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    else:
        keys = ()
    return found | {key: getattr(rope, key) for key in keys}
