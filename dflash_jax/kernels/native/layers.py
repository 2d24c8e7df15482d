"""Layers by native kernels, and largest numbers and draws of rows, in float32.

A token has the same bits in any company, which XLA does not promise.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.kernels.caches import LayerCache


def attend_native(
    q: Float[Array, "B T K N H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    live: Bool[Array, "B T"] | None = None,
    *,
    scale: float,
    groups: int | None = None,
) -> Float[Array, "B T K*G*H"]:
    """Compute `nn.attention.attend_whole`, reading the slots that queries see only.

    Args:
      live: tokens that count; results of the others are undefined. By default all do.
      groups: queries of each head, the first of its N vectors; all by default.
    """
    b, t, kv, count, h = q.shape
    groups = count if groups is None else groups
    absent = jnp.zeros((0,), jnp.float32)
    optional = (cache.k_scale, cache.v_scale, sinks)
    scales = (absent if x is None else x.astype(jnp.float32) for x in optional)
    out = jax.ShapeDtypeStruct((b, t, kv * groups * h), jnp.float32)
    call = jax.ffi.ffi_call("dflash_attend", out)
    heads = call(
        q.astype(jnp.float32),
        cache.k,
        cache.v,
        seen,
        *scales,
        _whether(live),
        scale=np.float32(scale),
        groups=np.int32(groups),
    )
    return heads.astype(q.dtype)


def write_native(
    cache: LayerCache,
    k: Float[Array, "B T K N H"],
    v: Float[Array, "B T K M H"],
    positions: Int[Array, "B T"],
    *,
    key: int = 0,
    value: int = 0,
) -> LayerCache:
    """Compute `nn.attention.write_keys_values` in the cache's own memory.

    Args:
      positions: positions of the tokens; tokens at negative ones are not written.
      key, value: which of the vectors of a head in `k` and in `v` they are.
    """
    kept: list[Any] = [cache.k, cache.v]
    if cache.k_scale is not None:
        kept += [cache.k_scale, cache.v_scale]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
    aliases = {3 + i: i for i in range(len(kept))}
    call = jax.ffi.ffi_call(
        "dflash_write" if cache.k_scale is None else "dflash_write_int8",
        out,
        input_output_aliases=aliases,
    )
    after = call(
        k.astype(jnp.float32),
        v.astype(jnp.float32),
        positions.astype(jnp.int32),
        *kept,
        ring=cache.ring,
        key=np.int32(key),
        value=np.int32(value),
    )
    if cache.k_scale is None:
        return dataclasses.replace(cache, k=after[0], v=after[1])
    return dataclasses.replace(cache, k=after[0], v=after[1], k_scale=after[2], v_scale=after[3])


def _whether(live: Bool[Array, "*positions"] | None) -> Bool[Array, " N"]:
    """Return which tokens count for a handler, none if it is to be seen from their numbers."""
    return jnp.ones((0,), bool) if live is None else live.ravel()


def normalise(
    x: Float[Array, "*positions D"],
    w: Float[Array, "*over D"],
    eps: float,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions D"]:
    """Return x / rms(x) times w in float32; w has the last axes of x.

    Args:
      live: positions that count; the others are undefined. By default all do.
    """
    rows, weights = (a.astype(jnp.float32).reshape(-1, x.shape[-1]) for a in (x, w))
    out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    call = jax.ffi.ffi_call("dflash_norm", out)
    return call(rows, _whether(live), weights, eps=np.float32(eps)).reshape(x.shape)


def prepare_heads(
    x: Float[Array, "B T *K N H"],
    norm: tuple[Float[Array, "*W H"], float] | None,
    cos: Float[Array, "B T half"] | None,
    sin: Float[Array, "B T half"] | None,
    live: Bool[Array, "B T"] | None = None,
    *,
    count: int | None = None,
) -> Float[Array, "B T *K N H"]:
    """Return heads in float32, normed and then rotated, in the memory of x if that is free.

    Args:
      norm: weights, which apply to W vectors and again to the next W, and epsilon.
      cos, sin: angles of the pairs (m, m + half) of the first 2 half numbers.
      live: tokens that count; the others are undefined. By default all do.
      count: number of leading vectors of a head, of N, that are changed; all by default.
    """
    tokens = x.shape[0] * x.shape[1]
    width = x.shape[-1]
    rows = x.astype(jnp.float32).reshape(tokens, -1)
    weights, eps = (jnp.zeros((0, width)), 0.0) if norm is None else norm
    none = jnp.zeros((0, 0), jnp.float32)
    angles = (none if a is None else a.astype(jnp.float32).reshape(tokens, -1) for a in (cos, sin))
    out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    call = jax.ffi.ffi_call("dflash_heads", out, input_output_aliases={0: 0})
    group = x.shape[-2]
    return call(
        rows,
        _whether(live),
        weights.astype(jnp.float32).reshape(-1, width),
        *angles,
        eps=np.float32(eps),
        group=np.int32(group),
        count=np.int32(group if count is None else count),
    ).reshape(x.shape)


def gate(x: Float[Array, "*positions 2 F"], *, gelu: bool) -> Float[Array, "*positions F"]:
    """Return silu(x[0]) · x[1], or the same by the tanh approximation of GELU, in float32."""
    rows = x.astype(jnp.float32).reshape(-1, *x.shape[-2:])
    out = jax.ShapeDtypeStruct((len(rows), rows.shape[2]), jnp.float32)
    return jax.ffi.ffi_call("dflash_gate", out)(rows, gelu=gelu).reshape(*x.shape[:-2], -1)


def softcap(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return cap tanh(x / cap) in float32."""
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    call = jax.ffi.ffi_call("dflash_softcap", out, input_output_aliases={0: 0})
    return call(rows, cap=np.float32(cap)).reshape(x.shape)


def route(
    logits: Float[Array, "*positions E"], count: int, *, chosen_only: bool
) -> tuple[Int[Array, "*positions X"], Float[Array, "*positions X"]]:
    """Return the `count` experts with the largest logits, and their float32 softmax.

    Of equal logits, the lowest expert comes first.

    Args:
      chosen_only: the softmax is over the logits of the chosen experts; otherwise over all.
    """
    rows = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
    shape = (len(rows), count)
    out = [jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)]
    ids, shares = jax.ffi.ffi_call("dflash_route", out)(rows, chosen_only=chosen_only)
    places = (*logits.shape[:-1], count)
    return ids.reshape(places), shares.reshape(places)


def largest(
    x: Float[Array, "*positions N"], live: Bool[Array, "*positions"] | None = None
) -> tuple[Int[Array, "*positions"], Bool[Array, "*positions"]]:
    """Return the first index of each position's largest number, and whether all are finite.

    Args:
      live: positions that are not known to be zeros; all by default.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    places = x.shape[:-1]
    read = jnp.ones(len(rows), bool) if live is None else live.ravel()
    out = [jax.ShapeDtypeStruct((len(rows),), dtype) for dtype in (jnp.int32, jnp.bool_)]
    index, finite = jax.ffi.ffi_call("dflash_largest", out)(rows, read)
    return index.reshape(places), finite.reshape(places)


def last_kept(
    x: Float[Array, "B N"],
    live: Bool[Array, " B"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Return the value over temperature and the index of the last number that each row keeps.

    Larger numbers are kept, too, and equal ones up to the index; see `graph.steps.filters`.

    Args:
      live: rows that count; the others keep all.
    """
    out = [jax.ShapeDtypeStruct((len(x),), dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("dflash_filter", out)
    value, index = call(x.astype(jnp.float32), live, temperature, top_k, top_p, min_p)
    return value, index


def drawn(
    x: Float[Array, "B N"],
    keys: UInt32[Array, "B 2"],
    live: Bool[Array, " B"],
    temperature: Float[Array, " B"],
    value: Float[Array, " B"],
    index: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Return a number of each row, drawn by its key from softmax(x / temperature) of those kept.

    Args:
      live: rows that count; the others get 0.
      value, index: value and index of the last number that is kept, as by `last_kept`.
    """
    out = jax.ShapeDtypeStruct((len(x),), jnp.int32)
    call = jax.ffi.ffi_call("dflash_draw", out)
    return call(x.astype(jnp.float32), keys, live, temperature, value, index)
