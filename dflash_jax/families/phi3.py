"""Phi-3 and Phi-4-mini: Llama with partly rotated heads and long-context rotary factors.

Queries, keys and values are one tensor, gates and ups another.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from dflash_jax.config.base import TargetConfig, dense_config, switched_window
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import rotated_share
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Concatenated, Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields, shortest
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import F32, U32, Typed
from dflash_jax.converters.formats.slots import Folder
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a Phi-3; its window, if shorter than the longest text, is of all layers.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.used.update(("embd_pdrop", "resid_pdrop"))  # training only
    for name, only in (("full_attn_mod", 1), ("interpolate_factor", 1)):
        f.must_be(name, only)
    f.must_be("lm_head_bias", False)
    f.must_be("mlp_bias", False)
    heads = f.integer("num_attention_heads")
    width = integer(f, "head_dim", f.integer("hidden_size") // max(heads, 1))
    rotated = int(width * rotated_share(f, 1.0))
    read = f.over(_without_share(f))
    config = dense_config(read, rotated=rotated)
    window = switched_window(read)
    f.used.update(read.used)
    if window is not None and window >= config.max_length:
        window = None
    return dataclasses.replace(
        config,
        windows=(window,) * config.num_layers,
        rms_norm_eps=f.number("rms_norm_eps", 1e-5),
        rotated=0 if rotated == width else rotated,
    )


def _without_share(f: Fields) -> dict[str, Any]:
    """Return all fields without the share of each head that rotates, which `rotated` replaces."""
    values = {key: value for key, value in f.values.items() if key != "partial_rotary_factor"}
    for name in ("rope_scaling", "rope_parameters"):
        inner = f.inner(name).values
        values[name] = {k: v for k, v in inner.items() if k != "partial_rotary_factor"}
    f.used.add("partial_rotary_factor")
    return values


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
    row_ranges = [range(inner), range(inner, 2 * inner)]
    if match[3].startswith("self_attn."):
        row_ranges = [tensors.rows_in_fused(config, which) for which in "qkv"]
    return {match[1] + part: rows for part, rows in zip(JOINED[match[3]], row_ranges, strict=True)}


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
    fields = config_json.decoder_fields(config, dtype, "Phi3ForCausalLM")
    for key in ("use_sliding_window", "layer_types"):
        del fields[key]
    share = (config.rotated or config.head_dim) / config.head_dim
    return fields | {"partial_rotary_factor": share}


# GGUF
ROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
FACTOR = "rope.scaling.attn_factor"
WINDOW = "attention.sliding_window"
OWN = {key: value for key, value in llama.UNAPPLIED.items() if key != WINDOW}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Phi-3."""
    fields.refuse_unless(OWN)
    hf_fields = keys.geometry(fields, partial=True, applied=(FACTOR,))
    width = hf_fields["head_dim"]
    hf_fields |= {
        "model_type": "phi3",
        "partial_rotary_factor": fields.count("rope.dimension_count", width, width) / width,
        "sliding_window": fields.whole(WINDOW, 1 << 24) or None,
    }
    if {*ROPE_FACTORS.values()} <= {*source.names()}:
        hf_fields["rope_scaling"] = _scaling(fields, source, hf_fields["max_position_embeddings"])
    return hf_fields


def _scaling(fields: GgufFields, source: GgufFile, length: int) -> dict[str, Any]:
    """Return the rotary scaling for texts of up to `length` tokens."""
    original = fields.count("rope.scaling.original_context_length", 1 << 24, length)
    divisors = {
        key: [shortest(float(x)) for x in source.read(name)] for key, name in ROPE_FACTORS.items()
    }
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **divisors}
    factor = fields.number(FACTOR, 1.0)
    usual = 1.0
    if length > original > 1:
        usual = math.sqrt(1 + math.log(length / original) / math.log(original))
    return (
        scaling
        if math.isclose(factor, usual, rel_tol=1e-6)
        else scaling | {"attention_factor": factor}
    )


def gguf_origin(name: str, config: TargetConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one, or its rows in a joined one."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[3] in JOINED["mlp.gate_up_proj.weight"]:
        both = f"blk.{match[2]}.ffn_up.weight"
        inner = config.intermediate_size
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
    metadata = {"rope.dimension_count": Typed(U32, config.rotated or config.head_dim)}
    metadata[WINDOW] = Typed(U32, next((w for w in config.windows if w), 0))
    if config.rope.kind != "longrope":
        return keys.rope(config.rope) | metadata
    return metadata | {
        "context_length": Typed(U32, round(config.rope.original_length * config.rope.factor)),
        FACTOR: Typed(F32, config.rope.attention_factor),
        "rope.scaling.original_context_length": Typed(U32, config.rope.original_length),
    }


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("phi3",),
    defaults={"phi3": {"max_position_embeddings": 4096}},
    slots=llama.slots,
    folder=folder,
    to_hf=to_hf,
    hf_stored=hf_stored,
    gguf=TargetGguf(
        architectures=("phi3",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=gguf_origin,
        stored=gguf_stored,
        computed=gguf_computed,
        ignored=gguf_ignored,
    ),
)
