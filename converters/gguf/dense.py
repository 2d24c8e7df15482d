"""GGUF tensors that decoders share: attention and MLPs under their usual names."""

from collections.abc import Mapping

import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.names.gguf import fused_name, stored_name

Shapes = Mapping[str, tuple[int, ...]]  # of every stored tensor


def biased(source: GgufFile) -> bool:
    """Return whether queries, keys and values have biases."""
    return not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(source.names())


def origin(name: str, config: TargetConfig, shapes: Shapes) -> Origin | None:
    """Return the origin of a tensor stored in Hugging Face's form, alone or in a fused qkv."""
    if (stored := stored_name(name)) in shapes:
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
    query = config.num_heads * config.head_dim * (1 + gated)
    pair = config.num_kv_heads * config.head_dim
    start, count = {"q": (0, query), "k": (query, pair), "v": (query + pair, pair)}[which]
    return range(start, start + count)


def reordered(origin: Origin, order: np.ndarray, change: str) -> Origin:
    """Return `origin` with its rows in another order."""
    first = origin.rows.start if isinstance(origin.rows, range) else 0
    said = f"{change}; {origin.change}" if origin.change else change
    return Origin(origin.name, first + order, said)
