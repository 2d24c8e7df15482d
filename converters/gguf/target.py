"""Targets in GGUF files: metadata into a configuration, tensors under canonical names."""

from typing import Any

import numpy as np

from converters import names
from converters.canonical import Canonical, Origin
from converters.gguf.fields import Fields, geometry, weight_dtype
from converters.gguf.file import GgufFile
from converters.gguf.rope import llama3_scaling
from converters.names.gguf import fused_name, half_split_rows, stored_name
from dflash_jax.config import TargetConfig, target_config
from dflash_jax.errors import ConfigError

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}  # GGUF name: model_type
NEIGHBOURS_ROTATE = frozenset({"llama"})  # q and k rows stored in that order
ROPE_FREQS = "rope_freqs.weight"
UNAPPLIED = {
    "expert_count": None,
    "attention.sliding_window": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "nextn_predict_layers": None,
}
IGNORED = {ROPE_FREQS: "its divisors became the rotary scaling of the configuration"}


def read_config(source: GgufFile, eos_token_ids: tuple[int, ...] = ()) -> TargetConfig:
    """The configuration of the target in a file."""
    return target_config(hf_fields(source, eos_token_ids), str(source.path))


def hf_fields(source: GgufFile, eos_token_ids: tuple[int, ...] = ()) -> dict[str, Any]:
    """The config.json that describes a file's target."""
    fields = Fields(source)
    if fields.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.where} holds the architecture {fields.architecture!r}; as a target this"
            f" version reads {', '.join(ARCHITECTURES)}"
        )
    fields.refuse_unless(UNAPPLIED)
    present = set(source.names())
    if "token_embd.weight" not in present:
        raise ConfigError(f"{fields.where} has no token_embd.weight; it is not a whole target")
    found = geometry(fields) | {
        "model_type": ARCHITECTURES[fields.architecture],
        "vocab_size": source.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in present,
        "attention_bias": "blk.0.attn_q.bias" in present or "blk.0.attn_qkv.bias" in present,
        "eos_token_id": list(eos_token_ids),
        "dtype": weight_dtype(source),
    }
    if ROPE_FREQS in present:
        divisors = source.read(ROPE_FREQS)
        theta = found["rope_theta"]
        found["rope_scaling"] = llama3_scaling(divisors, theta, where=fields.where)
    return found


def canonical(source: GgufFile, config: TargetConfig) -> Canonical:
    """The file under canonical names; tensors nobody asks for keep their own."""
    rows = {name: source.shape(name)[0] for name in source.names()}
    origins: dict[str, Origin] = {}
    for slot in names.slots(config):
        for part in slot.parts:
            if origin := _origin(part.name, config, rows):
                origins[part.name] = origin
    used = {origin.name for origin in origins.values()}
    rest = [name for name in source.names() if name not in used]
    ignored = {name: IGNORED[name] for name in rest if name in IGNORED}
    left_over = {name: Origin(name) for name in rest if name not in IGNORED}
    return Canonical(source, origins | left_over, ignored)


def _origin(name: str, config: TargetConfig, stored_rows: dict[str, int]) -> Origin | None:
    """Where a tensor is found; rows are reordered only if there are as many as there should be."""
    stored, fused = stored_name(name), fused_name(name)
    if fused is None:
        return Origin(stored) if stored in stored_rows else None
    query, pair = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    start, count = {"q": (0, query), "k": (query, pair), "v": (query + pair, pair)}[fused[1]]
    order, change = np.arange(count), ""
    if config.model_type in NEIGHBOURS_ROTATE and fused[1] in "qk":
        order = half_split_rows(count // config.head_dim, config.head_dim)
        change = "rotary rows: pairs to halves"
    if stored in stored_rows:
        fits = stored_rows[stored] == count
        return Origin(stored, order, change) if change and fits else Origin(stored)
    if stored_rows.get(fused[0]) == query + 2 * pair:
        return Origin(fused[0], start + order, f"{change}; from fused qkv".removeprefix("; "))
    return None
