"""Phi-3 and Phi-4-mini: queries, keys and values in one tensor, gates and ups in another."""

import math
import re
from typing import Any

import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Concatenated, Origin
from dflash_jax.converters.families import llama
from dflash_jax.converters.families.llama import slots
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry, shortest
from dflash_jax.converters.gguf.tensors import stored_name
from dflash_jax.converters.gguf.writer import F32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Folder

__all__ = ["folder", "from_gguf", "gguf_computed", "gguf_ignored", "gguf_origin", "gguf_stored"]
__all__ += ["hf_stored", "slots", "to_gguf", "to_hf"]

JOINED = {  # the parts of each stored tensor
    "self_attn.qkv_proj.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
}
IN_GGUF = {
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
}
_IN_LAYER = re.compile(r"(layers\.(\d+)\.)(.+)")


def folder(config: TargetConfig) -> Folder:
    """Split the joined tensors of published folders."""
    return Folder(split=lambda name: _rows(name, config))


def _rows(name: str, config: TargetConfig) -> dict[str, range]:
    """Return the rows of each part of a joined tensor, none for other tensors."""
    match = _IN_LAYER.fullmatch(name)
    if not match or match[3] not in JOINED:
        return {}
    inner = config.intermediate_size
    found = [range(inner), range(inner, 2 * inner)]
    if match[3].startswith("self_attn."):
        found = [tensors.rows_in_fused(config, which) for which in "qkv"]
    return {match[1] + part: rows for part, rows in zip(JOINED[match[3]], found, strict=True)}


def hf_stored(name: str, config: TargetConfig) -> dict[str, Origin]:
    """Return the stored tensor of a canonical one: that of the first part is the joined one."""
    match = _IN_LAYER.fullmatch(name)
    for joined, (first, *others) in JOINED.items():
        if match and match[3] == first:
            rest = tuple(match[1] + other for other in others)
            return {match[1] + joined: Concatenated(name, others=rest, change="joined")}
        if match and match[3] in others:
            return {}
    return {name: Origin(name)}


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    found = published.decoder_fields(config, dtype, "Phi3ForCausalLM")
    for key in ("use_sliding_window", "layer_types"):
        del found[key]
    share = (config.rotated or config.head_dim) / config.head_dim
    return found | {"partial_rotary_factor": share}


# GGUF
ROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
FACTOR, WINDOW = "rope.scaling.attn_factor", "attention.sliding_window"
OWN = {key: value for key, value in llama.UNAPPLIED.items() if key != WINDOW}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Phi-3."""
    fields.refuse_unless(OWN)
    found = geometry(fields, partial=True, applied=(FACTOR,))
    width = found["head_dim"]
    found |= {
        "model_type": "phi3",
        "partial_rotary_factor": fields.count("rope.dimension_count", width, width) / width,
        "sliding_window": fields.whole(WINDOW, 1 << 24) or None,
    }
    if {*ROPE_FACTORS.values()} <= {*source.names()}:
        found["rope_scaling"] = _scaling(fields, source, found["max_position_embeddings"])
    return found


def _scaling(fields: GgufFields, source: GgufFile, length: int) -> dict[str, Any]:
    """Return the rotary scaling for texts of up to `length` tokens."""
    original = fields.count("rope.scaling.original_context_length", 1 << 24, length)
    divisors = {
        key: [shortest(float(x)) for x in source.read(name)] for key, name in ROPE_FACTORS.items()
    }
    found = {"rope_type": "longrope", "original_max_position_embeddings": original, **divisors}
    factor, usual = fields.number(FACTOR, 1.0), 1.0
    if length > original > 1:
        usual = math.sqrt(1 + math.log(length / original) / math.log(original))
    return (
        found if math.isclose(factor, usual, rel_tol=1e-6) else found | {"attention_factor": factor}
    )


def gguf_origin(name: str, config: TargetConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one, or its rows in a joined one."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[3] in JOINED["mlp.gate_up_proj.weight"]:
        both, inner = f"blk.{match[2]}.ffn_up.weight", config.intermediate_size
        if both in shapes and shapes[both][0] == 2 * inner:
            rows = _rows(f"{match[1]}mlp.gate_up_proj.weight", config)[name]
            return Origin(both, rows, "from gates above ups")
    return tensors.origin(name, config, shapes)


def gguf_stored(name: str, config: TargetConfig) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""

    def renamed(stored: str) -> str:
        match = _IN_LAYER.fullmatch(stored)
        own = match and IN_GGUF.get(match[3])
        return f"blk.{match[2]}.{own}" if match and own else stored_name(stored)

    return {renamed(stored): origin for stored, origin in hf_stored(name, config).items()}


def gguf_computed(config: TargetConfig) -> dict[str, np.ndarray]:
    """Return the divisors of rotary frequencies."""
    if config.rope.kind != "longrope":
        return {}
    both = (config.rope.short_factors, config.rope.long_factors)
    return {n: np.array(f) for n, f in zip(ROPE_FACTORS.values(), both, strict=True)}


def gguf_ignored(name: str, config: TargetConfig) -> str | None:
    """Return why a tensor is not needed, or None if it is unexpected."""
    known = name in ROPE_FACTORS.values()
    return "its divisors became the rotary scaling of the configuration" if known else None


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Phi-3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"biases": config.attention_bias or config.mlp_bias})
    found = {"rope.dimension_count": Typed(U32, config.rotated or config.head_dim)}
    found[WINDOW] = Typed(U32, next((w for w in config.windows if w), 0))
    if config.rope.kind != "longrope":
        return keys.rope(config.rope) | found
    return found | {
        "context_length": Typed(U32, round(config.rope.original_length * config.rope.factor)),
        FACTOR: Typed(F32, config.rope.attention_factor),
        "rope.scaling.original_context_length": Typed(U32, config.rope.original_length),
    }
