"""Drafters in GGUF files, whatever their dialect, under one configuration and one set of names."""

import re
from typing import Any

from converters import names
from converters.canonical import Canonical, Origin
from converters.gguf.dialects import (
    BORROWED,
    DRAFTER_ARCHITECTURES,
    OUTER,
    POST_ATTENTION,
    RELATIVES,
    Dialect,
    read_dialect,
)
from converters.gguf.fields import Fields, geometry, weight_dtype
from converters.gguf.file import GgufFile
from converters.names.gguf import stored_name
from converters.taps import AUTO
from dflash_jax.config import FULL, SLIDING, DrafterConfig, drafter_config
from dflash_jax.errors import CheckpointError, ConfigError


def read_config(source: GgufFile, taps: str = AUTO) -> tuple[DrafterConfig, Dialect]:
    """The configuration of the drafter in a file, and what its dialect said."""
    fields = Fields(source)
    if fields.architecture not in DRAFTER_ARCHITECTURES:
        raise ConfigError(
            f"{fields.where} holds the architecture {fields.architecture!r}; as a drafter this"
            f" version reads {', '.join(DRAFTER_ARCHITECTURES)}"
        )
    _refuse_relatives(source)
    dialect = read_dialect(fields, taps)
    config = drafter_config(_hf_fields(source, fields, dialect), fields.where)
    _check_taps(source, config)
    return config, dialect


def _refuse_relatives(source: GgufFile) -> None:
    for name in source.names():
        if kind := next((v for k, v in RELATIVES.items() if k in name), None):
            raise ConfigError(
                f"{source.path} holds {name}, so it is {kind}; this version reads DFlash v1"
            )


def _hf_fields(source: GgufFile, fields: Fields, dialect: Dialect) -> dict[str, Any]:
    found = geometry(fields) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": dialect.vocab_size,
        "block_size": dialect.block_size,
        "attention_bias": "blk.0.attn_q.bias" in set(source.names()),
        "is_causal": dialect.is_causal,
        "hidden_act": fields.get("hidden_activation"),
        "dflash_config": {
            "mask_token_id": dialect.mask_token_id,
            "target_layer_ids": list(dialect.taps.ids),
            "input_embedding_scale": _optional(fields, "embedding_scale"),
            "output_multiplier": _optional(fields, "logit_scale"),
            "final_logit_softcapping": _optional(fields, "final_logit_softcapping"),
        },
        "dtype": weight_dtype(source),
    }
    return found | _windows(fields, found["num_hidden_layers"])


def _optional(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key, 0.0)


def _windows(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("attention.sliding_window") is None:
        return {}
    window = fields.count("attention.sliding_window", 1 << 24)
    key = "attention.sliding_window_pattern"
    pattern = [1] * layers if fields.get(key) is None else fields.ints(key)
    if len(pattern) != layers:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.{key} has {len(pattern)} entries;"
            f" the drafter has {layers} layers"
        )
    return {
        "sliding_window": window,
        "use_sliding_window": True,
        "layer_types": [SLIDING if sliding else FULL for sliding in pattern],
    }


def _check_taps(source: GgufFile, config: DrafterConfig) -> None:
    name = next((n for n in OUTER["fc.weight"] if n in set(source.names())), None)
    if name is None:
        return  # reported as missing with everything else
    into, taps = source.shape(name)[-1], len(config.target_layer_ids)
    if into != taps * config.hidden_size:
        raise ConfigError(
            f"{source.path}: {name} takes {into} features; {taps} taps of width"
            f" {config.hidden_size} make {taps * config.hidden_size}"
        )


def canonical(source: GgufFile, config: DrafterConfig) -> Canonical:
    """The file under canonical names; tensors nobody asks for keep their own."""
    present = set(source.names())
    origins: dict[str, Origin] = {}
    for slot in names.slots(config):
        for part in slot.parts:
            found = [name for name in aliases(part.name) if name in present]
            if len(found) > 1:
                raise CheckpointError(
                    f"{source.path}: {' and '.join(found)} both mean {part.name}; keep one"
                )
            if found:
                origins[part.name] = Origin(found[0])
    used = {origin.name for origin in origins.values()}
    rest = [name for name in source.names() if name not in used]
    ignored = {name: BORROWED[name] for name in rest if name in BORROWED}
    left_over = {name: Origin(name) for name in rest if name not in BORROWED}
    return Canonical(source, origins | left_over, ignored)


def aliases(name: str) -> tuple[str, ...]:
    """Every GGUF spelling of a canonical drafter tensor."""
    if name in OUTER:
        return OUTER[name]
    if match := re.fullmatch(r"layers\.(\d+)\.post_attention_layernorm\.weight", name):
        return tuple(f"{alias.format(match[1])}.weight" for alias in POST_ATTENTION)
    return (stored_name(name),)
