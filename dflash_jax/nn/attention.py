"""Cached attention in one masked buffer: write the new keys first, then attend.

Writing first makes a token's bits independent of the block it sits in (R2): every row
reduces over the same slots in the same order, whichever call filled them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.nn.layers import precision
from dflash_jax.state import LayerCache


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
    """softmax(scale q · k) · v over the whole buffer, grouped heads, float32 softmax.

    Args:
      scale: 1 / sqrt(H) by default.
      sinks: a logit per head that takes part in the softmax and carries no value (gpt-oss).
    """
    b, t, kv, g, h = q.shape
    scale = h**-0.5 if scale is None else scale
    q = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b, kv, g * t, h)
    scores = jnp.einsum(
        "bkqh,bksh->bkqs",
        q,
        cache.k,
        precision=precision(q),
        preferred_element_type=jnp.float32,
    ).reshape(b, kv, g, t, cache.slots)
    scores = jnp.where(seen[:, None, None], scores * jnp.float32(scale), -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    else:
        weights = _softmax_with_sinks(scores, sinks).astype(q.dtype)
    out = jnp.einsum(
        "bkqs,bksh->bkqh",
        weights.reshape(b, kv, g * t, cache.slots),
        cache.v,
        precision=precision(q),
        preferred_element_type=jnp.float32,
    ).astype(q.dtype)
    return jnp.transpose(out.reshape(b, kv, g, t, h), (0, 3, 1, 2, 4)).reshape(b, t, kv * g * h)


def _softmax_with_sinks(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, "K G"]
) -> Float[Array, "B K G T S"]:
    """The softmax over the scores and one more, of which nothing is kept but its share."""
    sink = sinks.astype(scores.dtype)[None, :, :, None, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    e = jnp.exp(scores - top)
    return e / (e.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
