"""GGUF metadata that decoders share, and the refusal of settings that it cannot express."""

import math
from collections.abc import Mapping

from dflash_jax.config import AttentionConfig, RopeConfig, TargetConfig
from dflash_jax.converters.gguf.header import STRING
from dflash_jax.converters.gguf.writer import F32, U32, Typed
from dflash_jax.errors import ConfigError

Metadata = dict[str, Typed]


def shared(config: AttentionConfig) -> Metadata:
    """Return the keys for size and attention, below the architecture's prefix."""
    width = config.head_dim
    return {
        "block_count": Typed(U32, config.num_layers),
        "embedding_length": Typed(U32, config.hidden_size),
        "feed_forward_length": Typed(U32, config.intermediate_size),
        "attention.head_count": Typed(U32, config.num_heads),
        "attention.head_count_kv": Typed(U32, config.num_kv_heads),
        "attention.key_length": Typed(U32, width),
        "attention.value_length": Typed(U32, width),
        "attention.layer_norm_rms_epsilon": Typed(F32, config.rms_norm_eps),
        "rope.freq_base": Typed(F32, config.rope.theta),
        "rope.dimension_count": Typed(U32, width),
    }


def experts(config: TargetConfig) -> Metadata:
    """Return the keys for number, choice and width of experts."""
    return {
        "expert_count": Typed(U32, config.num_experts),
        "expert_used_count": Typed(U32, config.experts_per_token),
        "expert_feed_forward_length": Typed(U32, config.expert_size),
    }


def rope(rope: RopeConfig, *, truncate: bool = True) -> Metadata:
    """Return the keys for a rescaled rotary embedding; none if it is not rescaled.

    Args:
      truncate: the value that readers assume for yarn, which has no key for it.

    Raises:
      ConfigError: no key can express the scaling.
    """
    if rope.kind == "default":
        return {}
    found = {
        "rope.scaling.type": Typed(STRING, rope.kind),
        "rope.scaling.factor": Typed(F32, rope.factor),
    }
    if rope.kind == "linear":
        return found
    usual = math.isclose(rope.attention_factor, 0.1 * math.log(max(rope.factor, 1.0)) + 1.0)
    if rope.kind == "yarn" and rope.truncate == truncate and usual:
        return found | {
            "rope.scaling.original_context_length": Typed(U32, rope.original_length),
            "rope.scaling.yarn_beta_fast": Typed(F32, rope.beta_fast),
            "rope.scaling.yarn_beta_slow": Typed(F32, rope.beta_slow),
        }
    raise ConfigError(
        f"rotary scaling {rope.kind} (truncate {rope.truncate}, attention factor"
        f" {rope.attention_factor}) has no place in this GGUF file; write the Hugging Face layout"
        " instead"
    )


def refuse(config: TargetConfig, settings: Mapping[str, bool]) -> None:
    """Check that no setting applies that the architecture's files cannot hold.

    Args:
      settings: whether each setting, in words, applies.

    Raises:
      ConfigError: at least one does.
    """
    if found := [words for words, applies in settings.items() if applies]:
        raise ConfigError(
            f"{', '.join(found)} of this {config.model_type} target: no place in a GGUF file of its"
            " architecture; write the Hugging Face layout instead"
        )
