"""Weights in the layouts of the native kernels, and products with them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num, UInt8

from dflash_jax.quant.layouts import Arrays, NativePacked, Packed, split, unpack_blocks

BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of 32 weights, by kind
KINDS = ("int8", *BLOCK_BYTES)


def multiply(x: Float[Array, "... D"], w: Any) -> Float[Array, "..."]:
    """Return x · w in float32; each row of x has the same result in any company.

    With int8 weights each row of x is quantised to int8 first, with ggml's blocks each 32 numbers
    of a row. Float weights, of any width, are multiplied in float32.

    Args:
      w: a `NativePacked`, or a `ColumnMajor`.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if isinstance(w, NativePacked):
        name, arrays = w.kind.lower(), list(w.arrays.values())
    else:
        name, arrays = "float", [w.array.reshape(-1, x.shape[-1])]
    out = jax.ShapeDtypeStruct((len(rows), math.prod(w.shape[1:])), jnp.float32)
    # Callers differ in what they do with the result; their fusions must not reach into it.
    product = jax.ffi.ffi_call(f"dflash_{name}", out)(rows, *arrays)
    return product.reshape(*x.shape[:-1], *w.shape[1:])


def gather(w: NativePacked, ids: Int[Array, " P"]) -> Float[Array, "P D"]:
    """Return columns of a packed weight [D, N] as float32."""
    arrays = {name: jnp.take(a, ids, axis=0, mode="clip") for name, a in w.arrays.items()}
    if w.kind == "int8":
        return arrays["codes"].astype(jnp.float32) * arrays["scale"][:, None]
    return _unpack(arrays["codes"], w.kind)


def _unpack(blocks: UInt8[Array, "P bytes"], kind: str) -> Float[Array, "P D"]:
    blocks = blocks.reshape(len(blocks), -1, BLOCK_BYTES[kind])

    def half(at: int) -> Float[Array, "P blocks 1"]:
        pair = blocks[:, :, at : at + 2]
        return jax.lax.bitcast_convert_type(pair, jnp.float16)[:, :, None].astype(jnp.float32)

    if kind == "Q8_0":
        codes = jax.lax.bitcast_convert_type(blocks[:, :, 2:], jnp.int8).astype(jnp.float32)
        return (half(0) * codes).reshape(len(blocks), -1)
    both = blocks[:, :, -16:]
    codes = jnp.concatenate([both & 15, both >> 4], axis=2).astype(jnp.float32)
    values = half(0) * (codes - 8) if kind == "Q4_0" else half(0) * codes + half(2)
    return values.reshape(len(blocks), -1)


def native_packed(w: Packed | NativePacked) -> NativePacked | Packed:
    """Return a packed weight in the layout of the native kernels; kinds without one stay.

    Arrays are moved by NumPy.
    """
    if isinstance(w, NativePacked) or w.kind not in KINDS:
        return w
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    if w.kind == "int8":
        moved = {"codes": np.ascontiguousarray(arrays["codes"].T), "scale": arrays["scale"][0]}
        return NativePacked(moved, w.kind, w.shape)
    return NativePacked({"codes": _blocks(arrays, w.kind)}, w.kind, w.shape)


def packed(w: NativePacked | Packed) -> Packed:
    """Return a packed weight in the layout for XLA, the inverse of `native_packed`."""
    if isinstance(w, Packed):
        return w
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    if w.kind == "int8":
        moved = {"codes": np.ascontiguousarray(arrays["codes"].T), "scale": arrays["scale"][None]}
        return Packed(moved, w.kind, w.shape)
    return Packed(unpack_blocks(arrays["codes"], w.kind), w.kind, w.shape)


def abstract(w: Packed) -> NativePacked | Packed:
    """Return the shapes of what `native_packed` returns."""
    if w.kind not in KINDS:
        return w
    depth, columns = w.shape[0], math.prod(w.shape[1:])
    if w.kind == "int8":
        codes = jax.ShapeDtypeStruct((columns, depth), jnp.int8)
        scale = jax.ShapeDtypeStruct((columns,), jnp.float32)
        return NativePacked({"codes": codes, "scale": scale}, w.kind, w.shape)
    codes = jax.ShapeDtypeStruct((columns, depth // 32 * BLOCK_BYTES[w.kind]), jnp.uint8)
    return NativePacked({"codes": codes}, w.kind, w.shape)


def _blocks(arrays: Arrays, kind: str) -> Num[np.ndarray, "N bytes"]:
    """Return rows of ggml's blocks, the inverse of `layouts.unpack_blocks`."""
    codes = arrays["codes"] if kind == "Q8_0" else split(arrays["codes"], 2)
    runs = np.moveaxis(codes.reshape(-1, 32, codes.shape[1]), 2, 0)  # [N, blocks, 32]
    halves = [arrays["scale"]] + ([-arrays["low"]] if kind == "Q4_1" else [])
    heads = [np.ascontiguousarray(h.T)[:, :, None].view(np.uint8) for h in halves]
    body = runs.view(np.uint8) if kind == "Q8_0" else runs[:, :, :16] | runs[:, :, 16:] << 4
    return np.concatenate([*heads, body], axis=2).reshape(len(runs), -1)
