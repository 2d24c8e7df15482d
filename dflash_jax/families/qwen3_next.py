"""Qwen3-Next and Qwen3-Coder-Next: the layers of Qwen3.5 with experts.

Input projections of recurrent layers are joined: for each key head, one tensor has its rows of
query, key, values and gates, another those of beta and alpha.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats.canonical import Concatenated, Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.writer import U32, Typed
from dflash_jax.converters.formats.slots import STACKED, Folder
from dflash_jax.families import qwen3_5, qwen3_5_gguf
from dflash_jax.families.entry import Family, TargetGguf
from dflash_jax.families.qwen3_5 import HybridConfig

KIND = "qwen3_next"
ALIKE = "qwen3_5_moe_text"
# Values of absent fields that differ from Qwen3.5's.
DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10}


def from_hf(f: Fields) -> HybridConfig:
    """Return the config of a Qwen3-Next; the width of dense MLPs, which no layer has, is ignored.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("use_sliding_window", False)
    set_fields = {name: value for name, value in f.values.items() if value is not None}
    set_fields.pop("use_sliding_window", None)
    reader = f.over(DEFAULTS | set_fields | {"model_type": ALIKE})
    config = qwen3_5.from_hf(reader)
    f.used.update(reader.used)
    return dataclasses.replace(config, model_type=KIND)


OTHERS = {r"^mtp\.": "multi-token prediction: not run"}
JOINED = {  # the parts of each stored tensor
    "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
}
_RECURRENT = re.compile(r"(layers\.(\d+)\.linear_attn\.)(.+)")


def folder(config: HybridConfig) -> Folder:
    """Split the joined tensors, and expect experts that may be stacked."""
    return Folder(ignored=OTHERS, fused=STACKED, split=lambda name: _split(name, config))


def _split(name: str, config: HybridConfig) -> dict[str, np.ndarray]:
    """Return the rows of each part of a joined tensor, none for other tensors."""
    match = _RECURRENT.fullmatch(name)
    if not match or match[3] not in JOINED:
        return {}
    part_rows = zip(JOINED[match[3]], _rows(match[3], config), strict=True)
    return {match[1] + part: rows for part, rows in part_rows}


def _rows(joined: str, config: HybridConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the two parts of a joined tensor."""
    each = config.value_heads // config.key_heads
    values = each * config.value_width
    qkvz = joined.startswith("in_proj_qkvz")
    widths = [config.key_width, config.key_width, values, values] if qkvz else [each, each]
    heads = np.arange(config.key_heads)[:, None] * sum(widths)
    ends = np.cumsum(widths)
    pieces = [
        (heads + np.arange(end - width, end)).reshape(-1)
        for end, width in zip(ends, widths, strict=True)
    ]
    return np.concatenate(pieces[:-1]), pieces[-1]


def hf_stored(name: str, config: HybridConfig) -> dict[str, Origin]:
    """Return the stored tensor of a canonical one: that of the first part is the joined one."""
    match = _RECURRENT.fullmatch(name)
    for joined, (first, second) in JOINED.items():
        if match and match[3] == first:
            order = np.argsort(np.concatenate(_rows(joined, config)))
            other = (match[1] + second,)
            return {match[1] + joined: Concatenated(name, order, "joined", others=other)}
        if match and match[3] == second:
            return {}
    return {name: Origin(name)}


def to_hf(config: HybridConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`.

    Raises:
      ConfigError: the rotary embedding is rescaled.
    """
    fields = qwen3_5.to_hf(dataclasses.replace(config, model_type=ALIKE), dtype)
    return fields | {"architectures": ["Qwen3NextForCausalLM"], "model_type": config.model_type}


# GGUF
IN_GGUF = {"in_proj_qkvz.weight": "ssm_in.weight", "in_proj_ba.weight": "ssm_ba.weight"}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3-Next."""
    return qwen3_5_gguf.from_gguf(fields, source) | {"model_type": "qwen3_next"}


def gguf_origin(name: str, config: HybridConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; older files join projections as folders do."""
    match = _RECURRENT.fullmatch(name)
    if not match:
        return qwen3_5_gguf.gguf_origin(name, config, shapes)
    _, layer, stem = match.groups()
    for joined, parts in JOINED.items():
        stored = f"blk.{layer}.{IN_GGUF[joined]}"
        if stem in parts and stored in shapes:
            rows = _rows(joined, config)[parts.index(stem)]
            whole = sum(map(len, _rows(joined, config)))
            return Origin(stored, rows, "from joined") if shapes[stored][0] == whole else None
    stored = f"blk.{layer}.{qwen3_5_gguf.LAYER[f'linear_attn.{stem}']}"
    if stored not in shapes:
        return None
    if stem == "A_log":
        words = "log of the negated decay"
        return Origin(stored, change=words, values=qwen3_5_gguf.log_negated, offset=1.0)
    shape = (config.conv_channels, 1, config.conv_kernel)
    return Origin(stored, reshaped=shape if stem == "conv1d.weight" else None)


def to_gguf(config: HybridConfig) -> keys.Metadata:
    """Return the metadata that is specific to Qwen3-Next.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    attends = [i + 1 for i, recurrent in enumerate(config.recurrent) if not recurrent]
    every = attends[0] if attends else config.num_layers + 1
    regular = attends == list(range(every, config.num_layers + 1, every))
    keys.refuse(config, {"attention in irregular layers": not regular})
    metadata = qwen3_5_gguf.to_gguf(config) | {"full_attention_interval": Typed(U32, every)}
    for key in ("attention.recurrent_layers", "rope.dimension_sections"):
        del metadata[key]
    return metadata


def gguf_stored(name: str, config: HybridConfig) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    match = _RECURRENT.fullmatch(name)
    if not match:
        return qwen3_5_gguf.gguf_stored(name, config)
    _, layer, stem = match.groups()
    joined = "in_proj_ba.weight"
    if stem in JOINED[joined]:
        origins = hf_stored(name, config).values()
        return {f"blk.{layer}.{IN_GGUF[joined]}": origin for origin in origins}
    stored = f"blk.{layer}.{qwen3_5_gguf.LAYER[f'linear_attn.{stem}']}"
    if stem == "A_log":
        return {stored: Origin(name, values=qwen3_5_gguf.negated_exp)}
    shape = (config.conv_channels, config.conv_kernel)
    return {stored: Origin(name, reshaped=shape if stem == "conv1d.weight" else None)}


FAMILY = Family(
    config=HybridConfig,
    from_hf=from_hf,
    model_types=(KIND,),
    defaults=qwen3_5.FAMILY.defaults,
    net="dflash_jax.families.qwen3_5_net",
    slots=qwen3_5.slots,
    folder=folder,
    to_hf=to_hf,
    hf_stored=hf_stored,
    gguf=TargetGguf(
        architectures=("qwen3next",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=gguf_origin,
        stored=gguf_stored,
        ignored=qwen3_5_gguf.gguf_ignored,
    ),
)
