"""Configurations as config.json files for other engines, in the published layout."""

from typing import Any

from dflash_jax import families
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.converters.formats import config_json
from dflash_jax.errors import ConfigError
from dflash_jax.families import drafter_kinds


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
    to_hf = families.family(config.model_type).to_hf
    if to_hf is None:
        exported = [name for name, other in families.target_families().items() if other.to_hf]
        raise ConfigError(
            f"a {config.model_type} target cannot be exported; {', '.join(exported)} can."
            " Its published folder is the form others read; `convert --to orbax` keeps it for"
            " dflash_jax"
        )
    return to_hf(config, dtype)


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
    own |= drafter_kinds()[config.kind].to_hf(config)
    described = config_json.geometry_fields(config) | {
        "architectures": [drafter_kinds()[config.kind].architectures[0]],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": dtype,
    }
    if config.rope.original_length:
        described["max_position_embeddings"] = config.rope.original_length
    return described | _causality(config)


def _causality(config: DrafterConfig) -> dict[str, Any]:
    """Return layer kinds, and `is_causal` if it differs from what the kinds imply."""
    sliding = [window is not None for window in config.windows]
    if not any(sliding) and len(set(config.causal)) > 1:
        sliding = list(config.causal)  # a sliding layer is causal even without a window
    kinds = config_json.window_fields(config.windows, sliding)
    if list(config.causal) == sliding:
        return kinds
    if len(set(config.causal)) > 1:
        raise ConfigError(
            f"the layers' causality {list(config.causal)} cannot be written: published files"
            " know one value for all, or sliding layers causal and the others not"
        )
    return kinds | {"is_causal": config.causal[0]}
