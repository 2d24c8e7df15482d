"""Drafters in GGUF files, whatever their dialect, under one configuration and one set of names."""

import dataclasses
import re
from typing import Any

import numpy as np

from dflash_jax.config import FULL, SLIDING, DrafterConfig, drafter_config
from dflash_jax.converters import names
from dflash_jax.converters.canonical import Canonical, Origin
from dflash_jax.converters.gguf.dialects import (
    BORROWED,
    CONFIDENCE,
    DRAFTER_ARCHITECTURES,
    IN_LAYER,
    OUTER,
    RELATIVES,
    Dialect,
    read_dialect,
)
from dflash_jax.converters.gguf.fields import Fields, geometry, weight_dtype
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.header import GgufArray
from dflash_jax.converters.names.gguf import stored_name
from dflash_jax.converters.taps import AUTO
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
    return _owned(source, config), dialect


def _owned(source: GgufFile, config: DrafterConfig) -> DrafterConfig:
    """The config with the tables of its own; a table alone serves as the head as well."""
    if config.kind != "dspark" and not config.draft_vocab_size:
        return config
    table, head = (name in source.names() for name in ("token_embd.weight", "output.weight"))
    own = head or table or bool(config.draft_vocab_size)
    return dataclasses.replace(config, own_embedding=table, own_head=own)


def _refuse_relatives(source: GgufFile) -> None:
    for name in source.names():
        if kind := next((v for k, v in RELATIVES.items() if k in name), None):
            raise ConfigError(
                f"{source.path} holds {name}, so it is {kind}; this version reads DFlash,"
                " DFlash 2 and DSpark as llama.cpp writes them"
            )


def _hf_fields(source: GgufFile, fields: Fields, dialect: Dialect) -> dict[str, Any]:
    kind, own = _heads(source, fields)
    found = geometry(fields) | {
        "architectures": [kind],
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
            **own,
        },
        "dtype": weight_dtype(source),
    }
    if "d2t" in source.names():
        found["draft_vocab_size"] = source.shape("d2t")[0]
    return found | _windows(fields, found["num_hidden_layers"])


SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _heads(source: GgufFile, fields: Fields) -> tuple[str, dict[str, Any]]:
    """Which kind of drafter it is, and what is said of its heads."""
    present = {name: source.shape(name) for name in source.names()}
    if any(name in present for name in OUTER["candidate_selector.hidden_projection.weight"]):
        return "DFlash2DraftModel", {key: fields.count(key, 1 << 16) for key in SIZES}
    anchored = fields.get("sample_from_anchor")
    said = {} if anchored is None else {"sample_from_anchor": bool(anchored)}
    confidence = next((present[n] for n in OUTER[CONFIDENCE] if n in present), None)
    if "markov_w1.weight" not in present and confidence is None:
        return "DFlashDraftModel", said
    rank = present.get("markov_w1.weight", (0, 0))[-1]
    alone = fields.count("embedding_length", 131072)
    if confidence is not None:
        said["confidence_head_with_markov"] = confidence[-1] != alone
    own = {"markov_rank": rank, "enable_confidence_head": confidence is not None}
    return "DSparkDraftModel", said | own


def _optional(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key, 0.0)


def _windows(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("attention.sliding_window") in (None, 0):  # as llama.cpp has it
        return {}
    window = fields.count("attention.sliding_window", 1 << 24)
    key = "attention.sliding_window_pattern"
    if fields.get(key) is None:
        pattern = [1] * layers
    elif isinstance(fields.get(key), GgufArray):
        pattern = fields.ints(key)
    else:  # every n-th layer is full
        every = fields.count(key, 1024)
        pattern = [(i + 1) % every for i in range(layers)]
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
                origins[part.name] = _origin(part.name, found[0], part.shape)
    if "lm_head.weight" not in origins and config.own_head:
        table = origins.get("embed_tokens.weight")
        if table and source.shape(table.name) == (config.choices, config.hidden_size):
            origins["lm_head.weight"] = Origin(table.name, change="tied to the drafter's own table")
    used = {origin.name for origin in origins.values()}
    rest = [name for name in source.names() if name not in used]
    ignored = {name: BORROWED[name] for name in rest if name in BORROWED}
    left_over = {name: Origin(name) for name in rest if name not in BORROWED}
    return Canonical(source, origins | left_over, ignored)


def _origin(name: str, stored: str, shape: tuple[int, ...]) -> Origin:
    """Where a tensor lies, and what turns it into its published form."""
    if name == "d2t":
        return Origin(stored, change="ids to offsets", values=_offsets, reshaped=shape)
    if name == CONFIDENCE:
        return Origin(stored, reshaped=shape)  # some writers drop the axis of length 1
    return Origin(stored)


def _offsets(ids: np.ndarray) -> np.ndarray:
    return ids - np.arange(len(ids), dtype=ids.dtype).reshape(-1, 1)


def aliases(name: str) -> tuple[str, ...]:
    """Every GGUF spelling of a canonical drafter tensor."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match and match[2] in IN_LAYER:
        return tuple(f"blk.{match[1]}.{alias}" for alias in IN_LAYER[match[2]])
    return OUTER[name] if name in OUTER else (stored_name(name),)
