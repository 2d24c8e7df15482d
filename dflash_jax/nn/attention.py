"""Rotary embeddings, and cached attention over one buffer: keys are written, then attended to.

This makes a token's bits independent of the block it is in: every row reduces over the same
slots in the same order, whichever call filled them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8, Num

from dflash_jax.config import RopeConfig
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.native.layers import attend_native, prepare_heads, write_native
from dflash_jax.nn.layers import product

# Rotary position embeddings with half-split pairs, absolute positions and float32 angles.


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Return the angular frequency of each pair, float32 [dim/2] (formulas of transformers 5)."""
    base = 1.0 / _stretched(rope, dim) ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "proportional":  # the other pairs are not rotated
        turning = np.arange(dim // 2) < int(rope.partial_rotary_factor * dim // 2)
        return (base * turning / rope.factor).astype(np.float32)
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        smooth = np.clip((rope.original_length / wavelength - low) / (high - low), 0.0, 1.0)
        return (base * smooth + base / rope.factor * (1 - smooth)).astype(np.float32)
    if rope.kind == "yarn":
        ramp = _yarn_ramp(rope, dim)
        return (base * (1 - ramp) + base / rope.factor * ramp).astype(np.float32)
    if rope.kind == "longrope":
        divisors = rope.long_factors if rope.length else rope.short_factors
        return np.divide(base, divisors).astype(np.float32)
    return base.astype(np.float32)


def _stretched(rope: RopeConfig, dim: int) -> float:
    """Return the base, enlarged by dynamic scaling for texts beyond the original length."""
    if rope.kind != "dynamic" or not rope.length:
        return rope.theta
    times = rope.factor * rope.length / rope.original_length - (rope.factor - 1)
    return rope.theta * times ** (dim / (dim - 2))


def _yarn_ramp(rope: RopeConfig, dim: int) -> np.ndarray:
    """Return 0 for pairs that keep their frequency, 1 for fully rescaled ones, [dim/2]."""

    def pair_turning(turns: float) -> float:
        reach = rope.original_length / (turns * 2 * math.pi)
        return dim * math.log(reach) / (2 * math.log(rope.theta))

    first = pair_turning(rope.beta_fast)
    last = pair_turning(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    span = (last - first) or 0.001
    return np.clip((np.arange(dim // 2) - first) / span, 0.0, 1.0)


def rope_tables(
    rope: RopeConfig, dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return cos and sin of every pair's angle, float32, times the attention factor."""
    frequencies = jnp.asarray(inverse_frequencies(rope, dim))
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate_leading(
    x: Float[Array, "B T *heads H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    kernels: str,
    *,
    neighbours: bool = False,
) -> Float[Array, "B T *heads H"]:
    """Rotate the first 2 * half dimensions of each head and keep the others.

    Args:
      neighbours: pairs are (2m, 2m + 1). The result has their first halves first, which products
        of queries and keys do not depend on.
    """
    size = 2 * cos.shape[-1]
    first = x[..., :size]
    rest = x[..., size:]
    if neighbours:
        pairs = first.reshape(*first.shape[:-1], size // 2, 2)
        first = jnp.swapaxes(pairs, -1, -2).reshape(first.shape)
    turned = rotate(first, cos, sin, kernels)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotate(
    x: Float[Array, "B T *heads H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    kernels: str,
) -> Float[Array, "B T *heads H"]:
    """Rotate pairs (m, m + H/2) of x; cos and sin are rounded to x's dtype first."""
    if kernels == "native":
        return prepare_heads(x, None, cos.astype(x.dtype), sin.astype(x.dtype)).astype(x.dtype)
    shape = (*cos.shape[:2], *(1,) * (x.ndim - 3), 1, cos.shape[2])
    cos, sin = (t.astype(x.dtype).reshape(shape) for t in (cos, sin))
    pairs = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    turned = jnp.concatenate([-sin, sin], axis=-2) * jax.lax.rev(pairs, (x.ndim - 1,))
    return (pairs * cos + turned).reshape(x.shape)


def scaled_queries(
    q: Float[Array, "B T K G H"],
    growth: float,
    rope: RopeConfig,
    positions: Int[Array, "B T"],
    most: int,
) -> Float[Array, "B T K G H"]:
    """Return queries times 1 + growth log(1 + position // length), as Llama 4 and Ministral 3 do.

    The factor, rounded to the queries' dtype, is read from a table: XLA's logarithm may round
    differently in calls of another width.

    Args:
      rope: has the length.
      most: positions that the table covers.
    """
    times = np.arange(most // rope.original_length + 1)
    table = jnp.asarray((1 + growth * np.log1p(times)).astype(np.float32), q.dtype)
    factor = table[positions // rope.original_length]
    return q * factor[:, :, None, None, None]


PIECE = 256  # slots that `attend_pieces` handles at a time


def to_int8(x: Float[Array, "... H"]) -> tuple[Int8[Array, "... H"], Float[Array, "..."]]:
    """Return codes from -127 to 127 and the scale of each vector."""
    x32 = x.astype(jnp.float32)
    scale = jnp.abs(x32).max(axis=-1) / jnp.float32(127)
    codes = jnp.round(x32 / jnp.where(scale == 0, 1.0, scale)[..., None])
    return codes.astype(jnp.int8), scale


def _put(
    buffer: Num[Array, "B K S ..."], rows: Num[Array, "B K T ..."], start: Int[Array, " B"]
) -> Num[Array, "B K S ..."]:
    window = tuple(range(1, buffer.ndim))
    along = jax.lax.ScatterDimensionNumbers(window, (), (2,), (0,), (0,))  # T slots at once
    return jax.lax.scatter(
        buffer,
        start[:, None],
        rows,
        along,
        indices_are_sorted=True,
        unique_indices=True,
        mode="clip",
    )


def _put_ring(
    buffer: Num[Array, "B K S ..."], rows: Num[Array, "B K T ..."], start: Int[Array, " B"]
) -> Num[Array, "B K S ..."]:
    at = (start[:, None] + jnp.arange(rows.shape[2])[None, :]) % buffer.shape[2]  # [B, T]
    window = (1, *range(3, buffer.ndim))
    slots = jax.lax.ScatterDimensionNumbers(window, (2,), (2,), (0,), (0,))  # one by one
    return jax.lax.scatter(buffer, at[:, :, None], rows, slots, unique_indices=True, mode="drop")


@struct.dataclass
class Positions:
    """Positions of the tokens of a call.

    Attributes:
      start: position of each row's first token.
      each: position of each token; -1 for dead ones, which see no key: padding, tokens of rows that
        wait, and drafts that were not made.
      all_live: whether it is known when tracing that no token is dead.
    """

    start: Int[Array, " B"]
    each: Int[Array, "B T"]
    all_live: bool = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, start: Int[Array, " B"], width: int, num_live: Int[Array, " B"] | None = None
    ) -> "Positions":
        """Return the positions of `width` tokens a row, of which the first ones are live."""
        index = jnp.arange(width)[None, :]
        each = start[:, None] + index
        if num_live is not None:
            each = jnp.where(index < num_live[:, None], each, -1)
        return cls(start, each, num_live is None)

    @property
    def end(self) -> Int[Array, " B"]:
        """The position after each row's last token."""
        return self.start + self.each.shape[1]

    @property
    def live(self) -> Bool[Array, "B T"] | None:
        """Which tokens are live; None if it is known when tracing that all are."""
        return None if self.all_live else self.each >= 0

    def zero_dead(self, x: Float[Array, "B T *rest"]) -> Float[Array, "B T *rest"]:
        """Return numbers of tokens with zeros in place of those of dead ones."""
        if self.all_live:
            return x
        live = jnp.expand_dims(self.each >= 0, range(2, x.ndim))
        return jnp.where(live, x, 0)


def write_keys_values(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Positions,
    kernels: str,
) -> LayerCache:
    """Return the cache with k, v written at the positions of T tokens of each batch row.

    What is written for dead tokens is undefined, and seen by none.

    A mask excludes non-finite keys, but not non-finite values: zero times infinity is NaN. Such a
    value is therefore written as zero and its key as NaN. Queries that see the slot become
    non-finite, as they should; queries before a rejected draft do not.
    """
    if kernels == "native":
        return write_native(cache, k[..., None, :], v[..., None, :], positions.each)
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))  # [B, K, T, H]
    if cache.k_scale is None:
        k = k.astype(cache.k.dtype)
        v = v.astype(cache.v.dtype)
    finite = jnp.isfinite(v)
    k = jnp.where(finite, k, jnp.nan)
    v = jnp.where(finite, v, 0)
    new = {"k": k, "v": v}
    if cache.k_scale is not None:
        codes, scale = to_int8(k)
        new = {"k": codes, "k_scale": scale}
        new["v"], new["v_scale"] = to_int8(v)
    if k.shape[2] == 1:
        # XLA copies the whole cache to write a single row; the copy of it lands in an unused slot.
        new = {name: jnp.concatenate([x, x], axis=2) for name, x in new.items()}
    put = _put_ring if cache.ring else _put
    written = {name: put(getattr(cache, name), x, positions.start) for name, x in new.items()}
    return dataclasses.replace(
        cache,
        k=written["k"],
        v=written["v"],
        k_scale=written.get("k_scale"),
        v_scale=written.get("v_scale"),
    )


def slot_positions(end: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Return the position that each slot holds after `end` writes; negative for empty slots.

    One rule covers both kinds of cache: slot s holds the newest position below `end` that is
    congruent to s modulo the number of slots, which is s itself in a plain cache.
    """
    last = end[:, None] - 1
    return last - (last - jnp.arange(slots)[None, :]) % slots


def visible(
    query: Int[Array, "B T"], key: Int[Array, "B S"], *, causal: bool, window: int | None
) -> Bool[Array, "B T S"]:
    """Return which keys each query may see.

    They have been written, are not later if `causal`, and are closer than the window.
    """
    q = query[:, :, None]
    k = key[:, None, :]
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
    kernels: str,
    *,
    scale: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T N*H"]:
    """Return softmax(scale q · k) · v over the live slots, for grouped heads, softmax in float32.

    Native and Pallas kernels read only slots that are seen. A CPU without them reads a large buffer
    in pieces up to the last slot that any row sees, a GPU all slots at once.

    Args:
      kernels: as `Plan.kernels`.
      scale: 1 / sqrt(H) by default.
      sinks: a logit per head that is part of the softmax and has no value (gpt-oss).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    whole, pieces = (functools.partial(f, scale=scale) for f in (attend_whole, attend_pieces))
    if kernels == "native":
        return attend_native(q, cache, seen, sinks, scale=scale)
    forms = {}
    if kernels == "pallas":
        from dflash_jax.kernels.pallas_attention import attend_kernel, fits  # Pallas

        if fits(q.shape[1], cache):
            forms["cuda"] = functools.partial(attend_kernel, scale=scale)
    # A call that fills its buffer, as in training, can skip nothing, and may be differentiated.
    if not cache.ring and cache.slots > max(2 * PIECE, 2 * q.shape[1]):
        forms["cpu"] = pieces
    if not forms:
        return whole(q, cache, seen, sinks)
    return jax.lax.platform_dependent(q, cache, seen, sinks, **forms, default=whole)


def attend_whole(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N*H"]:
    """Compute `attend` over all slots at once; the reference for the other forms."""
    b, t, kv, g, _h = q.shape
    scores = _scores(_by_head(q), cache, seen, g, scale)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    out = _sums(weights.reshape(b, kv, g * t, cache.slots), cache, q.dtype)
    return _by_token(out.astype(q.dtype), t)


def attend_pieces(
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N*H"]:
    """Compute `attend` piece by piece, up to the last live slot.

    A piece that is not visible to a row multiplies its sums by one and adds zeros, so that its
    bits do not depend on the positions of other rows.
    """
    b, t, kv, g, h = q.shape
    heads = _by_head(q)
    slots = cache.slots
    live = jnp.max(jnp.where(seen.any(axis=(0, 1)), jnp.arange(1, slots + 1), 0))
    Sums = tuple[Array, Array, Array]  # maximum score, sum of exponentials, weighted values

    def add(i: Int[Array, ""], sums: Sums) -> Sums:
        top, total, out = sums
        start = jnp.minimum(i * PIECE, slots - PIECE)  # the last piece may overlap
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=PIECE, axis=2
        )
        fresh = start + jnp.arange(PIECE) >= i * PIECE
        piece = jax.tree.map(cut, cache)
        part = cut(seen) & fresh[None, None]
        scores = _scores(heads, piece, part, g, scale).reshape(b, kv, g * t, PIECE)
        higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        base = jnp.where(jnp.isfinite(higher), higher, 0.0)  # nothing visible so far
        e = jnp.exp(scores - base)
        keep = jnp.exp(top - base)
        total = total * keep + e.sum(axis=-1, keepdims=True)
        return higher, total, out * keep + _sums(e, piece, q.dtype)

    one = (b, kv, g * t, 1)
    sums = (jnp.full(one, -jnp.inf), jnp.zeros(one), jnp.zeros((*one[:3], h)))
    top, total, out = jax.lax.fori_loop(0, -(-live // PIECE), add, sums)
    if sinks is not None:
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(kv, g), t, axis=1)[None, :, :, None]
        total += jnp.exp(sink - top)
    return _by_token((out / total).astype(q.dtype), t)


def _by_head(q: Float[Array, "B T K G H"]) -> Float[Array, "B K G*T H"]:
    """Return the queries grouped by kv head, whose keys are then read once for all of them."""
    b, t, kv, g, h = q.shape
    return jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b, kv, g * t, h)


def _by_token(out: Float[Array, "B K G*T H"], t: int) -> Float[Array, "B T N*H"]:
    b, kv, rows, h = out.shape
    out = jnp.transpose(out.reshape(b, kv, rows // t, t, h), (0, 3, 1, 2, 4))
    return out.reshape(b, t, kv * (rows // t) * h)


def _scores(
    q: Float[Array, "B K G*T H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    groups: int,
    scale: float,
) -> Float[Array, "B K G T S"]:
    """Return scaled float32 scores, minus infinity where a query does not see a key."""
    b, kv, rows, _ = q.shape
    scores = product("bkqh,bksh->bkqs", q, cache.k.astype(q.dtype))
    scores = scores.reshape(b, kv, groups, rows // groups, cache.slots)
    if cache.k_scale is not None:
        scores *= cache.k_scale[:, :, None, None]
    return jnp.where(seen[:, None, None], scores * jnp.float32(scale), -jnp.inf)


def _sums(
    weights: Float[Array, "B K Q S"], cache: LayerCache, dtype: DTypeLike
) -> Float[Array, "B K Q H"]:
    """Return weighted sums of values in float32; weights are rounded to `dtype` first."""
    if cache.v_scale is not None:
        weights *= cache.v_scale[:, :, None]
    weights = weights.astype(dtype)
    return product("bkqs,bksh->bkqh", weights, cache.v.astype(dtype))


def _softmax_with_sinks(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, "K G"]
) -> Float[Array, "B K G T S"]:
    """Return the softmax over the scores and a sink, without the sink's own weight."""
    sink = sinks.astype(scores.dtype)[None, :, :, None, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    e = jnp.exp(scores - top)
    return e / (e.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
