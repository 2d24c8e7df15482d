"""GGUF tensors that decoders share: attention, MLPs and experts under their usual names."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.converters.formats.canonical import Origin, Piled
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.errors import ConfigError

# GGUF tensor names, and the row order for rotation.


OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def stored_name(canonical: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the GGUF name of a tensor of a dense decoder; other tensors keep their name.

    Args:
      own: names in a layer that differ, by the canonical name in the layer.
    """
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", canonical)
    if match and match[2] in own:
        return f"blk.{match[1]}.{own[match[2]]}"
    match = _IN_LAYER.fullmatch(canonical)
    if match and match[2] in LAYER:
        layer, stem, suffix = match.groups()
        return f"blk.{layer}.{LAYER[stem]}.{suffix}"
    return OUTER.get(canonical, canonical)


def fused_name(canonical: str) -> tuple[str, str] | None:
    """Return the name of the fused tensor, and which part it is, for q, k and v; else None."""
    match = re.fullmatch(r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", canonical)
    if match is None:
        return None
    layer, which, suffix = match.groups()
    return f"blk.{layer}.attn_qkv.{suffix}", which


def half_split_rows(heads: int, width: int) -> np.ndarray:
    """Return the row order of a file that rotates neighbours (2m, 2m + 1) in pairs.

    dflash_jax rotates pairs (m, m + width / 2): for each head, even rows come first.
    """
    order = np.arange(width).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * width + order).reshape(-1)


# GGUF tensors that decoders share: attention and MLPs under their usual names.


Shapes = Mapping[str, tuple[int, ...]]  # shapes of stored tensors by name


def biased(source: GgufFile) -> bool:
    """Return whether queries, keys and values have biases."""
    return not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(source.names())


def origin(
    name: str,
    config: TargetConfig,
    shapes: Shapes,
    own: Mapping[str, str] = MappingProxyType({}),
) -> Origin | None:
    """Return the origin of a tensor stored in Hugging Face's form, alone or in a fused qkv."""
    if (stored := stored_name(name, own)) in shapes:
        return Origin(stored)
    return fused_origin(name, config, shapes)


def fused_origin(
    name: str, config: TargetConfig, shapes: Shapes, *, gated: bool = False
) -> Origin | None:
    """Return the origin of a part of a fused qkv; `gated` queries alternate with gates."""
    if (fused := fused_name(name)) is None:
        return None
    within = rows_in_fused(config, fused[1], gated=gated)
    whole = rows_in_fused(config, "v", gated=gated).stop
    if fused[0] not in shapes or shapes[fused[0]][0] != whole:
        return None
    return Origin(fused[0], within, "from fused qkv")


def rows_in_fused(config: TargetConfig, which: str, *, gated: bool = False) -> range:
    """Return the rows of q, k or v in a tensor [q; k; v]."""
    query = config.num_heads * config.head_dim
    if gated:
        query *= 2
    pair = config.num_kv_heads * config.head_dim
    if which == "q":
        return range(query)
    start = query if which == "k" else query + pair
    return range(start, start + pair)


def reordered(origin: Origin, order: np.ndarray, change: str) -> Origin:
    """Return `origin` with its rows in another order."""
    first = origin.rows.start if isinstance(origin.rows, range) else 0
    said = f"{change}; {origin.change}" if origin.change else change
    return Origin(origin.name, first + order, said)


# Stacked experts in GGUF files: [E, out, in], gate and up separate or concatenated.


MAX_EXPERTS = 4096
SOFTMAX = 1  # expert_gating_func: over all experts, before the choice
_ONE = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def expert_origin(name: str, config: TargetConfig, shapes: Shapes) -> Origin | None:
    """Return one expert's weight in its layer's stack; None if `name` is not an expert's."""
    if (match := _ONE.fullmatch(name)) is None:
        return None
    layer = match[1]
    expert = int(match[2])
    which = match[3]
    stack, both = (f"blk.{layer}.ffn_{x}_exps.weight" for x in (which, "gate_up"))
    if _stacked(shapes.get(stack), config):
        size = shapes[stack][1]
        return Origin(stack, range(expert * size, (expert + 1) * size), "one of stacked experts")
    if which != "down" and _stacked(shapes.get(both), config):
        size = shapes[both][1] // 2
        start = 2 * expert * size
        if which == "up":
            start += size
        return Origin(both, range(start, start + size), "one of stacked experts, gate over up")
    return None


def expert_stored(name: str, config: TargetConfig) -> dict[str, Origin] | None:
    """Return the stack that begins with an expert's weight; None if `name` is not an expert's."""
    if (match := _ONE.fullmatch(name)) is None:
        return None
    layer, expert, which = match.groups()
    if int(expert):
        return {}
    at = f"layers.{layer}.mlp.experts."
    names = [f"{at}{e}.{which}_proj.weight" for e in range(config.num_experts)]
    return {f"blk.{layer}.ffn_{which}_exps.weight": Piled(names[0], others=tuple(names[1:]))}


def _stacked(shape: tuple[int, ...] | None, config: TargetConfig) -> bool:
    return shape is not None and len(shape) == 3 and shape[0] == config.num_experts


def expert_counts(fields: GgufFields, *, gating: int = SOFTMAX) -> dict[str, Any]:
    """Return number and choice of experts, under their Hugging Face names.

    Raises:
      ConfigError: the architecture chooses its experts in another way.
    """
    chooser = fields.get("expert_gating_func")
    if chooser not in (None, 0, gating):
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.expert_gating_func is {chooser!r}; this"
            f" architecture chooses by {gating}"
        )
    fields.refuse_unless({"expert_weights_scale": 1.0, "expert_group_count": 1.0})
    return {
        "num_experts": fields.count("expert_count", MAX_EXPERTS),
        "num_experts_per_tok": fields.count("expert_used_count", MAX_EXPERTS),
    }
