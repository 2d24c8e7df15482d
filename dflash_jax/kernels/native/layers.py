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
    q: Float[Array, "B T K G H"],
    cache: LayerCache,
    seen: Bool[Array, "B T S"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N*H"]:
    """Compute `nn.attention.attend_whole`, reading the slots that queries see only."""
    b, t, kv, g, h = q.shape
    absent = jnp.zeros((0,), jnp.float32)
    optional = (cache.k_scale, cache.v_scale, sinks)
    scales = (absent if x is None else x.astype(jnp.float32) for x in optional)
    out = jax.ShapeDtypeStruct((b, t, kv * g * h), jnp.float32)
    queries = q.astype(jnp.float32)
    heads = jax.ffi.ffi_call("dflash_attend", out)(
        queries, cache.k, cache.v, seen, *scales, scale=np.float32(scale)
    )
    return heads.astype(q.dtype)


def write_native(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
) -> LayerCache:
    """Compute `nn.attention.write_keys_values` in the cache's own memory.

    Args:
      positions: of the tokens; those with a negative one are not written.
    """
    names = ("k", "v") if cache.k_scale is None else ("k", "v", "k_scale", "v_scale")
    kept = [getattr(cache, name) for name in names]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
    aliases = {3 + i: i for i in range(len(kept))}
    call = jax.ffi.ffi_call(
        "dflash_write" if cache.k_scale is None else "dflash_write_int8",
        out,
        input_output_aliases=aliases,
    )
    numbers = (x.astype(jnp.float32) for x in (k, v))
    after = call(*numbers, positions.astype(jnp.int32), *kept, ring=cache.ring)
    written: dict[str, Any] = dict(zip(names, after, strict=True))
    return dataclasses.replace(cache, **written)


def normalise(
    x: Float[Array, "... D"], w: Float[Array, "*over D"], eps: float
) -> Float[Array, "... D"]:
    """Return x / rms(x) times w in float32; w has the last axes of x."""
    rows, weights = (a.astype(jnp.float32).reshape(-1, x.shape[-1]) for a in (x, w))
    out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    return jax.ffi.ffi_call("dflash_norm", out)(rows, weights, eps=np.float32(eps)).reshape(x.shape)


def rotate_pairs(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T *heads H"]:
    """Return the pairs (m, m + H/2) of x rotated, in float32."""
    tokens = x.shape[0] * x.shape[1]
    vectors = x.astype(jnp.float32).reshape(tokens, -1, x.shape[-1])
    angles = (a.astype(jnp.float32).reshape(tokens, -1) for a in (cos, sin))
    out = jax.ShapeDtypeStruct(vectors.shape, jnp.float32)
    return jax.ffi.ffi_call("dflash_rotate", out)(vectors, *angles).reshape(x.shape)


def gate(x: Float[Array, "*places 2 F"], *, gelu: bool) -> Float[Array, "*places F"]:
    """Return silu(x[0]) · x[1], or the same by the tanh approximation of GELU, in float32."""
    rows = x.astype(jnp.float32).reshape(-1, *x.shape[-2:])
    out = jax.ShapeDtypeStruct((len(rows), rows.shape[2]), jnp.float32)
    return jax.ffi.ffi_call("dflash_gate", out)(rows, gelu=gelu).reshape(*x.shape[:-2], -1)


def largest(
    x: Float[Array, "*places N"], live: Bool[Array, "*places"] | None = None
) -> tuple[Int[Array, "*places"], Bool[Array, "*places"]]:
    """Return the first index of each place's largest number, and whether all are finite.

    Args:
      live: places that are not known to be zeros; all by default.
    """
    rows, places = x.astype(jnp.float32).reshape(-1, x.shape[-1]), x.shape[:-1]
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
      value, index: of the last number that is kept, as by `last_kept`.
    """
    out = jax.ShapeDtypeStruct((len(x),), jnp.int32)
    call = jax.ffi.ffi_call("dflash_draw", out)
    return call(x.astype(jnp.float32), keys, live, temperature, value, index)
