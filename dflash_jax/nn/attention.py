"""Cached attention in one masked buffer: write the new keys first, then attend.

Writing first makes a token's bits independent of the block it sits in (R2): every row
reduces over the same slots in the same order, whichever call filled them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.nn.layers import precision
from dflash_jax.state import LayerCache

PIECE = 256  # slots that `attend_pieces` takes at a time


def write_rows(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    start: Int[Array, " B"],
) -> LayerCache:
    """The cache with rows k, v at positions start .. start+T-1 of each batch row."""
    k, v = (jnp.swapaxes(x, 1, 2).astype(cache.k.dtype) for x in (k, v))  # [B, K, T, H]
    if k.shape[2] == 1:
        # XLA copies the whole cache to write a single row; the twin lands in a garbage slot.
        k, v = (jnp.concatenate([x, x], axis=2) for x in (k, v))
    put = _put_ring if cache.ring else _put
    return dataclasses.replace(cache, k=put(cache.k, k, start), v=put(cache.v, v, start))


def _put(
    buffer: Float[Array, "B K S H"], rows: Float[Array, "B K T H"], start: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    update = jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice_in_dim(b, r, s, axis=1))
    return update(buffer, rows, start)


def _put_ring(
    buffer: Float[Array, "B K S H"], rows: Float[Array, "B K T H"], start: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    at = (start[:, None] + jnp.arange(rows.shape[2])[None, :]) % buffer.shape[2]  # [B, T]
    return jax.vmap(lambda b, r, i: b.at[:, i].set(r, unique_indices=True))(buffer, rows, at)


def slot_positions(end: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Position held by each slot when `end` rows were written; negative where none was.

    One rule for both kinds of cache: slot s holds the newest position below `end` that is
    congruent to s modulo the slots, which in a plain cache is s itself.
    """
    last = end[:, None] - 1
    return last - (last - jnp.arange(slots)[None, :]) % slots


def visible(
    query: Int[Array, "B T"], key: Int[Array, "B S"], *, causal: bool, window: int | None
) -> Bool[Array, "B T S"]:
    """Which keys a query may see: written ones, not later if causal, closer than the window."""
    q, k = query[:, :, None], key[:, None, :]
    seen = jnp.broadcast_to(k >= 0, (*query.shape, key.shape[1]))
    if causal:
        seen &= k <= q
    if window is not None:
        seen &= q - k < window
        if not causal:
            seen &= k - q < window
    return seen


def attend(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    *,
    scale: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T N*H"]:
    """softmax(scale q · k) · v over the live part of the buffer, grouped heads, float32 softmax.

    A CPU goes through a large buffer in pieces and stops after the last slot that any row sees;
    other devices take it in one.

    Args:
      scale: 1 / sqrt(H) by default.
      sinks: a logit per head that takes part in the softmax and carries no value (gpt-oss).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    whole, pieces = (functools.partial(f, scale=scale) for f in (attend_whole, attend_pieces))
    # A call that fills its buffer, as in training, has nothing to skip and may be differentiated.
    if cache.ring or cache.slots <= max(2 * PIECE, 2 * q.shape[1]):
        return whole(q, cache, seen, sinks)
    return jax.lax.platform_dependent(q, cache, seen, sinks, cpu=pieces, default=whole)


def attend_whole(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N*H"]:
    """As `attend`, all slots at once: the form the others are checked against."""
    b, t, kv, g, h = q.shape
    scores = _scores(_by_head(q), cache.k, seen, g, scale).reshape(b, kv, g, t, cache.slots)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    else:
        weights = _softmax_with_sinks(scores, sinks).astype(q.dtype)
    out = _sums(weights.reshape(b, kv, g * t, cache.slots), cache.v).astype(q.dtype)
    return _by_token(out, t)


def attend_pieces(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N*H"]:
    """As `attend`, a piece of the slots after the other, none behind the last live one.

    A piece that a row sees nothing of multiplies its sums by one and adds zeros, so that its
    bits do not depend on how far other rows have come (R9).
    """
    b, t, kv, g, h = q.shape
    heads, slots = _by_head(q), cache.slots
    live = jnp.max(jnp.where(seen.any(axis=(0, 1)), jnp.arange(1, slots + 1), 0))
    Sums = tuple[Array, Array, Array]  # greatest score, sum of exponentials, of values

    def add(i: Int[Array, ""], sums: Sums) -> Sums:
        top, total, out = sums
        start = jnp.minimum(i * PIECE, slots - PIECE)  # the last piece may overlap
        piece = jax.lax.dynamic_slice_in_dim
        fresh = start + jnp.arange(PIECE) >= i * PIECE
        part = piece(seen, start, PIECE, axis=2) & fresh[None, None]
        scores = _scores(heads, piece(cache.k, start, PIECE, axis=2), part, g, scale)
        scores = scores.reshape(b, kv, g * t, PIECE)
        higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        base = jnp.where(jnp.isfinite(higher), higher, 0.0)  # nothing was seen yet
        e, keep = jnp.exp(scores - base), jnp.exp(top - base)
        total = total * keep + e.sum(axis=-1, keepdims=True)
        more = _sums(e.astype(q.dtype), piece(cache.v, start, PIECE, axis=2))
        return higher, total, out * keep + more

    one = (b, kv, g * t, 1)
    sums = (jnp.full(one, -jnp.inf), jnp.zeros(one), jnp.zeros((*one[:3], h)))
    top, total, out = jax.lax.fori_loop(0, -(-live // PIECE), add, sums)
    if sinks is not None:
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(kv, g), t, axis=1)[None, :, :, None]
        total += jnp.exp(sink - top)
    return _by_token((out / total).astype(q.dtype), t)


def _by_head(q: Float[Array, "B T K G H"]) -> Float[Array, "B K G*T H"]:
    """Queries of a kv head side by side: its keys are read once for all of them."""
    b, t, kv, g, h = q.shape
    return jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b, kv, g * t, h)


def _by_token(out: Float[Array, "B K G*T H"], t: int) -> Float[Array, "B T N*H"]:
    b, kv, rows, h = out.shape
    out = jnp.transpose(out.reshape(b, kv, rows // t, t, h), (0, 3, 1, 2, 4))
    return out.reshape(b, t, kv * (rows // t) * h)


def _scores(
    q: Float[Array, "B K G*T H"],
    k: Float[Array, "B K S H"],
    seen: Bool[Array, "B T S"],
    groups: int,
    scale: float,
) -> Float[Array, "B K G T S"]:
    """Scaled float32 scores, minus infinity where a query does not see a key."""
    b, kv, rows, _ = q.shape
    scores = jnp.einsum(
        "bkqh,bksh->bkqs", q, k, precision=precision(q), preferred_element_type=jnp.float32
    ).reshape(b, kv, groups, rows // groups, k.shape[2])
    return jnp.where(seen[:, None, None], scores * jnp.float32(scale), -jnp.inf)


def _sums(
    weights: Float[Array, "B K Q S"], v: Float[Array, "B K S H"]
) -> Float[Array, "B K Q H"]:
    """Weighted sums of values, float32."""
    return jnp.einsum(
        "bkqs,bksh->bkqh",
        weights,
        v,
        precision=precision(weights),
        preferred_element_type=jnp.float32,
    )


def _softmax_with_sinks(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, "K G"]
) -> Float[Array, "B K G T S"]:
    """The softmax over the scores and one more, of which nothing is kept but its share."""
    sink = sinks.astype(scores.dtype)[None, :, :, None, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    e = jnp.exp(scores - top)
    return e / (e.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
