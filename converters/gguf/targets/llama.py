"""Llama: rows of queries and keys pair neighbours for rotation; divisors instead of a scaling."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf.fields import Fields, geometry
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.rope import llama3_scaling
from dflash_jax.converters.gguf.targets import dense
from dflash_jax.converters.names.gguf import fused_name, half_split_rows

ROPE_FREQS = "rope_freqs.weight"
UNAPPLIED = {
    "expert_count": None,
    "attention.sliding_window": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "nextn_predict_layers": None,
}


def hf_fields(fields: Fields, source: GgufFile) -> dict[str, Any]:
    """The fields of config.json that are Llama's own."""
    fields.refuse_unless(UNAPPLIED)
    present = set(source.names())
    bias = "blk.0.attn_q.bias" in present or "blk.0.attn_qkv.bias" in present
    found = geometry(fields) | {"model_type": "llama", "attention_bias": bias}
    if ROPE_FREQS in present:
        divisors, theta = source.read(ROPE_FREQS), found["rope_theta"]
        found["rope_scaling"] = llama3_scaling(divisors, theta, where=fields.where)
    return found


def origin(name: str, config: TargetConfig, shapes: dense.Shapes) -> Origin | None:
    """Where a canonical tensor lies; rows are reordered only if their number is right."""
    found, fused = dense.origin(name, config, shapes), fused_name(name)
    if found is None or fused is None or fused[1] == "v":
        return found
    count = len(dense.rows_in_fused(config, fused[1]))
    if found.rows is None and shapes[found.name][0] != count:
        return found
    order = half_split_rows(count // config.head_dim, config.head_dim)
    return dense.reordered(found, order, "rotary rows: pairs to halves")


def ignored(name: str, config: TargetConfig) -> str | None:
    """Why a tensor nobody asks for is not needed; None if it should not be there."""
    if name == ROPE_FREQS:
        return "its divisors became the rotary scaling of the configuration"
    return None
