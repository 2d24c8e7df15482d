"""Metadata and tensor names of a drafter in llama.cpp's `dflash` architecture."""

import math
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import SLIDING, DrafterConfig
from dflash_jax.converters import families
from dflash_jax.converters.gguf.dialects import UPSTREAM
from dflash_jax.converters.gguf.drafter import aliases
from dflash_jax.converters.gguf.header import STRING
from dflash_jax.converters.gguf.writer import BOOL, F32, I32, U32, Typed, typed
from dflash_jax.converters.names import published
from dflash_jax.errors import ConfigError

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}


def file_name(canonical: str) -> str:
    """Return the upstream name of a canonical drafter tensor."""
    return aliases(canonical)[0]


def metadata(
    config: DrafterConfig, dtype: str, tokenizer: Mapping[str, Any] | None = None
) -> dict[str, Typed]:
    """Return all keys of a drafter file.

    Args:
      tokenizer: metadata of a target whose tokenizer is copied.

    Raises:
      ConfigError: the drafter has no form in GGUF.
    """
    if config.draft_vocab_size and not config.own_head:
        raise ConfigError("a reduced vocabulary without its own head has no form in GGUF")
    width = config.head_dim
    own = {
        "block_count": Typed(U32, config.num_layers),
        "context_length": Typed(U32, config.rope.original_length or 4096),
        "embedding_length": Typed(U32, config.hidden_size),
        "feed_forward_length": Typed(U32, config.intermediate_size),
        "attention.head_count": Typed(U32, config.num_heads),
        "attention.head_count_kv": Typed(U32, config.num_kv_heads),
        "attention.key_length": Typed(U32, width),
        "attention.value_length": Typed(U32, width),
        "attention.layer_norm_rms_epsilon": Typed(F32, config.rms_norm_eps),
        "rope.freq_base": Typed(F32, config.rope.theta),
        "rope.dimension_count": Typed(U32, width),
        "vocab_size": Typed(U32, config.vocab_size),
        "block_size": Typed(U32, config.block_size),
        "target_layers": Typed(I32, [i + 1 for i in config.target_layer_ids]),
    }
    own |= _rope(config) | _attention(config) | _scales(config)
    own |= families.provided(config.kind, "to_gguf")(config)
    general = {
        "general.architecture": Typed(STRING, UPSTREAM),
        "general.type": Typed(STRING, "model"),
        "general.file_type": Typed(U32, FILE_TYPES[dtype]),
    }
    found = general | {f"{UPSTREAM}.{key}": value for key, value in own.items()}
    for key, value in (tokenizer or {}).items():
        if key.startswith("tokenizer."):
            found[key] = typed(value)
    return found | {"tokenizer.ggml.mask_token_id": Typed(U32, config.mask_token_id)}


def _rope(config: DrafterConfig) -> dict[str, Typed]:
    rope = config.rope
    if rope.kind == "default":
        return {}
    found = {
        "rope.scaling.type": Typed(STRING, rope.kind),
        "rope.scaling.factor": Typed(F32, rope.factor),
    }
    if rope.kind == "linear":
        return found
    usual = math.isclose(rope.attention_factor, 0.1 * math.log(max(rope.factor, 1.0)) + 1.0)
    if rope.kind == "yarn" and rope.truncate and usual:
        return found | {
            "rope.scaling.original_context_length": Typed(U32, rope.original_length),
            "rope.scaling.yarn_beta_fast": Typed(F32, rope.beta_fast),
            "rope.scaling.yarn_beta_slow": Typed(F32, rope.beta_slow),
        }
    raise ConfigError(
        f"rotary scaling {rope.kind} (truncate {rope.truncate}, attention factor"
        f" {rope.attention_factor}) has no place in a drafter GGUF; export to the Hugging Face"
        " layout instead"
    )


def _attention(config: DrafterConfig) -> dict[str, Typed]:
    """Return windows, and as upstream does, causality only if the layers do not imply it."""
    fields = published.drafter_fields(config, "float32")
    found = {}
    if fields["sliding_window"] is not None:
        pattern = [kind == SLIDING for kind in fields["layer_types"]]
        found["attention.sliding_window"] = Typed(U32, fields["sliding_window"])
        found["attention.sliding_window_pattern"] = Typed(BOOL, pattern)
    elif SLIDING in fields["layer_types"]:
        raise ConfigError("causal and other layers without a window have no form in a drafter GGUF")
    if "is_causal" in fields:
        found["attention.causal"] = Typed(BOOL, fields["is_causal"])
    return found


def _scales(config: DrafterConfig) -> dict[str, Typed]:
    own = published.drafter_fields(config, "float32")["dflash_config"]
    keys = {
        "input_embedding_scale": "embedding_scale",
        "output_multiplier": "logit_scale",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {keys[k]: Typed(F32, own[k]) for k in keys if k in own}
