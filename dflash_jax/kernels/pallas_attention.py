"""Attention of a block over a cache as two Pallas kernels for NVIDIA GPUs (Triton).

The slots are cut into parts of a fixed size. A program of the first kernel handles a kv head and a
part, reads only the pieces that are visible to its row of the batch, and writes a partial sum; the
second kernel adds the live parts in order. A row's result depends on its own slots only, and
scores are never written to memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.kernels.caches import LayerCache

WIDEST = 32  # most tokens of a block: one bit per token says whether it sees a slot
PIECE = 64  # slots read at a time
PARTS = 64  # most parts, unless a part would have more than MOST slots
LEAST = 256  # least slots of a part
MOST = 1024  # most slots of a part
TILE = 1 << 13  # numbers of a partial sum that fit the registers of a program


def fits(tokens: int, cache: LayerCache) -> bool:
    """Whether the kernels support calls of `tokens` tokens over a cache of this shape."""
    dim = cache.k.shape[3]
    powers = tokens & (tokens - 1) == 0 and dim & (dim - 1) == 0
    return powers and tokens <= WIDEST and dim >= 16 and cache.slots >= PIECE


def attend_kernel(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T N*H"]:
    """Compute `attention.attend_whole`, up to rounding.

    Args:
      interpret: run the kernels as ordinary JAX operations, for tests without a GPU.
    """
    b, t, kv, g, h = q.shape
    part = _part(cache.slots)
    parts = -(-cache.slots // part)
    rows = max(16, 1 << (g * t - 1).bit_length())  # rows of a kv head, group by group
    heads = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b * kv, g * t, h)
    heads = jnp.pad(heads, ((0, 0), (0, rows - g * t), (0, 0)))
    live = _pieces(seen)
    token = jnp.arange(t, dtype=jnp.int32)[None, :, None]
    bits = (seen.astype(jnp.int32) << token).sum(axis=1, dtype=jnp.int32)  # [B, S]
    sinks = jnp.full((kv, g), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)

    sums = _partial_sums(live, heads, bits, cache, tokens=t, scale=scale, interpret=interpret)
    of_row = pl.BlockSpec((None,), lambda i, *_: (i // kv,))
    of_group = pl.BlockSpec((None, parts, t), lambda i, j: (i, 0, j))
    return pl.pallas_call(
        functools.partial(_add_parts, pieces=part // PIECE),
        grid=(b * kv, g),
        in_specs=[
            of_row,
            of_row,
            pl.BlockSpec((None, None), lambda i, j: (i % kv, j)),
            of_group,
            of_group,
            pl.BlockSpec((None, parts, t, h), lambda i, j: (i, 0, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, t, h), lambda i, j: (i // kv, 0, i % kv * g + j)),
        out_shape=jax.ShapeDtypeStruct((b, t, kv * g * h), q.dtype),
        name="attend_add",
        interpret=interpret,
        compiler_params=_compiler_params(interpret=interpret),
    )(*live, sinks, *sums)


def _compiler_params(*, interpret: bool) -> triton.CompilerParams | None:
    """Return how Triton compiles the kernels; None where they are interpreted."""
    return None if interpret else triton.CompilerParams(num_warps=4, num_stages=2)


def _partial_sums(
    live: tuple[Int[Array, " B"], Int[Array, " B"]],
    heads: Float[Array, "B*K R H"],
    bits: Int[Array, "B S"],
    cache: LayerCache,
    *,
    tokens: int,
    scale: float,
    interpret: bool,
) -> Any:
    """Run the first kernel: the maximum, the sum and the weighted values of every part."""
    kv = cache.k.shape[1]
    slots = cache.slots
    part = _part(cache.slots)
    parts = -(-slots // part)
    (count, rows, h) = heads.shape
    tile = min(rows, max(16, TILE // h))
    scales = [] if cache.k_scale is None else [cache.k_scale, cache.v_scale]
    of_row = pl.BlockSpec((None,), lambda i, *_: (i // kv,))
    of_head = pl.BlockSpec((None, None, slots, h), lambda i, *_: (i // kv, i % kv, 0, 0))
    scaled = pl.BlockSpec((None, None, slots), lambda i, *_: (i // kv, i % kv, 0))
    partial = pl.BlockSpec((None, None, tile), lambda i, j, p: (i, p, j))
    one = jax.ShapeDtypeStruct((count, parts, rows), jnp.float32)
    return pl.pallas_call(
        functools.partial(_sum_part, part=part, tokens=tokens, scale=scale),
        grid=(count, rows // tile, parts),
        in_specs=[
            of_row,
            of_row,
            pl.BlockSpec((None, tile, h), lambda i, j, p: (i, j, 0)),
            pl.BlockSpec((None, slots), lambda i, *_: (i // kv, 0)),
            of_head,
            of_head,
            *(scaled for _ in scales),
        ],
        out_specs=[
            partial,
            partial,
            pl.BlockSpec((None, None, tile, h), lambda i, j, p: (i, p, j, 0)),
        ],
        out_shape=[one, one, jax.ShapeDtypeStruct((*one.shape, h), jnp.float32)],
        name="attend_parts",
        interpret=interpret,
        compiler_params=_compiler_params(interpret=interpret),
    )(*live, heads, bits, cache.k, cache.v, *scales)


def _part(slots: int) -> int:
    """Return the slots of a part. It depends on the cache size only, to keep the order of sums."""
    wanted = -(-slots // (PARTS * PIECE)) * PIECE
    return min(max(wanted, LEAST), MOST)


def _pieces(seen: Bool[Array, "B T S"]) -> tuple[Array, Array]:
    """Return the first piece that any token of each row sees, and the end of the last one."""
    live = seen.any(axis=1)
    slot = jnp.arange(seen.shape[2], dtype=jnp.int32)
    first = jnp.where(live, slot, seen.shape[2]).min(axis=1) // PIECE
    end = jnp.where(live, slot + PIECE, 0).max(axis=1) // PIECE
    return first.astype(jnp.int32), end.astype(jnp.int32)


def _sum_part(first: Any, end: Any, *refs: Any, part: int, tokens: int, scale: float) -> None:
    """Compute a part's maximum score, sum of exponentials and sum of values for a tile of rows.

    `refs` are queries, bits, keys, values and the scales of int8 caches, then the three results.
    """
    q_ref, bits, k_ref, v_ref, *scales, top_ref, total_ref, out_ref = refs
    tile = q_ref.shape[0]
    slots = k_ref.shape[0]
    at = pl.program_id(2) * (part // PIECE)
    low = jnp.maximum(first[...], at)
    high = jnp.minimum(end[...], at + part // PIECE)
    row = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    Sums = tuple[Array, Array, Array]

    def add(i: Array, sums: Sums) -> Sums:
        top, total, out = sums
        start = jnp.minimum(i * PIECE, slots - PIECE)  # the last piece may overlap
        here = pl.ds(start, PIECE)
        fresh = start + jnp.arange(PIECE, dtype=jnp.int32) >= i * PIECE
        seen = (bits[here][None, :] >> (row % tokens)[:, None]) & 1
        q = q_ref[...]
        k = k_ref[here, :]
        v = v_ref[here, :]
        scores = _dot(q, k.astype(q.dtype).T) * jnp.float32(scale)
        scores = scores * scales[0][here][None, :] if scales else scores
        scores = jnp.where((seen == 1) & fresh[None, :], scores, -jnp.inf)
        higher = jnp.maximum(top, scores.max(axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # nothing visible so far
        e = jnp.exp(scores - base[:, None])
        keep = jnp.exp(top - base)
        total = total * keep + e.sum(axis=1)
        e = e * scales[1][here][None, :] if scales else e
        return higher, total, out * keep[:, None] + _dot(e.astype(q.dtype), v.astype(q.dtype))

    @pl.when(low < high)
    def _() -> None:
        zero = jnp.zeros((tile,), jnp.float32)
        sums = zero - jnp.inf, zero, jnp.zeros(q_ref.shape, jnp.float32)
        top_ref[...], total_ref[...], out_ref[...] = jax.lax.fori_loop(low, high, add, sums)


def _add_parts(
    first: Any, end: Any, sink: Any, tops: Any, totals: Any, outs: Any, out: Any, *, pieces: int
) -> None:
    """Combine the live parts of one query head, and divide by the total."""
    Sums = tuple[Array, Array, Array]

    def add(i: Array, sums: Sums) -> Sums:
        top, total, value = sums
        higher = jnp.maximum(top, tops[i, :])
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        keep = jnp.exp(top - base)
        fresh = jnp.exp(tops[i, :] - base)
        total = total * keep + totals[i, :] * fresh
        return higher, total, value * keep[:, None] + outs[i, :, :] * fresh[:, None]

    zero = jnp.zeros((out.shape[0],), jnp.float32)
    sums = zero - jnp.inf, zero, jnp.zeros(out.shape, jnp.float32)
    low = first[...] // pieces
    high = (end[...] + pieces - 1) // pieces
    top, total, value = jax.lax.fori_loop(low, high, add, sums)
    total += jnp.exp(sink[...] - top)
    out[...] = (value / total[:, None]).astype(out.dtype)


def _dot(a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
