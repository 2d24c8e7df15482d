"""Weights in strips of 16 columns, the layout of the native kernels; NumPy moves them.

All arrays of a weight [D, N] begin with its strips, the last of which is padded with zeros:

| kind | arrays |
| --- | --- |
| floats | `values` [strips, D, 16] |
| int8 | `codes` + 128 [strips, D / 4, 64], four codes of each column; `scale` [strips, 16] |
| others | `codes` [strips, D / 32, bytes of a group], `scale`, and others of `Packed`, [.., 16] |

`formats.h` describes the codes of a group.
"""

import ctypes
import functools
import math
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num, UInt8

from dflash_jax.native.build import library
from dflash_jax.quant.formats import KINDS, RUN
from dflash_jax.quant.layouts import Interleaved, Packed, join, split

WIDTH = 16  # columns of a strip
ORDER = ("codes", "scale", "low", "zero", "sub", "sub_low")  # of the kernels' arguments
HIGH = ((0, 0), (2, 4), (4, 1), (6, 5))  # bit of a byte of high bits, and its first quad of two
LARGE = 1 << 21  # bytes of arrays that begin at a page, and may have huge ones


def shapes(kind: str, depth: int, columns: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array of a packed weight [D, N], in `ORDER`."""
    format_, strips = KINDS[kind], -(-columns // WIDTH)
    if kind == "int8":
        codes = (strips, -(-depth // 4), 4 * WIDTH)
        return {"codes": (codes, np.uint8), "scale": ((strips, WIDTH), np.float32)}
    group = RUN * WIDTH // format_.spread + (RUN * WIDTH // 4 if format_.high else 0)
    found: dict[str, tuple[tuple[int, ...], Any]] = {
        "codes": ((strips, depth // RUN, group), np.uint8)
    }
    arrays = format_.arrays(depth)
    for name in ORDER[1:]:
        if name in arrays:
            rows, dtype = arrays[name]
            found[name] = ((strips, rows, WIDTH), dtype)
    return found


def interleave(w: Packed) -> Interleaved:
    """Return a packed weight in strips."""
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    format_, depth = KINDS[w.kind], w.shape[0]
    if w.kind == "int8":
        codes = _quads(arrays["codes"].view(np.uint8) ^ np.uint8(128))
        return Interleaved(
            {"codes": codes, "scale": _by_strip(arrays["scale"])[:, 0]}, w.kind, w.shape
        )
    if format_.classes == 1:
        codes = _quads(arrays["codes"].view(np.uint8) ^ np.uint8(128))
    else:
        groups = _quads(split(arrays["codes"], 2)).reshape(-1, depth // RUN, 8, 4 * WIDTH)
        codes = groups[:, :, :4] | groups[:, :, 4:] << np.uint8(4)
    if format_.high:
        groups = _quads(split(arrays["high"], 4)).reshape(-1, depth // RUN, 8, 4 * WIDTH)
        parts = (groups[:, :, i : i + 3 : 2] << np.uint8(bit) for bit, i in HIGH)
        codes = np.concatenate([codes, functools.reduce(np.bitwise_or, parts)], axis=2)
    moved = {"codes": _aligned(codes.reshape(len(codes), depth // RUN, -1))}
    moved |= {name: _by_strip(arrays[name]) for name in ORDER[1:] if name in arrays}
    return Interleaved(moved, w.kind, w.shape)


def deinterleave(w: Interleaved) -> Packed:
    """Return a packed weight in the layout for XLA, the inverse of `interleave`."""
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    format_, depth, columns = KINDS[w.kind], w.shape[0], math.prod(w.shape[1:])
    codes = arrays.pop("codes")
    found = {n: _rows(a.reshape(len(a), -1, WIDTH), columns) for n, a in arrays.items()}
    if format_.classes == 1:
        whole = _unquads(codes, columns)[:depth] ^ np.uint8(128)
        found["codes"] = whole.view(np.int8)
    else:
        groups = codes.reshape(len(codes), depth // RUN, -1, 4 * WIDTH)
        low = groups[:, :, :4]
        nibbles = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=2)
        found["codes"] = join(_unquads(nibbles, columns), 2)
        if format_.high:
            high = np.empty_like(nibbles)
            for bit, i in HIGH:
                high[:, :, i : i + 3 : 2] = groups[:, :, 4:] >> np.uint8(bit) & np.uint8(3)
            found["high"] = join(_unquads(high, columns), 4)
    return Packed({name: found[name] for name in format_.arrays(depth)}, w.kind, w.shape)


def from_blocks(
    parts: Iterable[tuple[UInt8[np.ndarray, "n bytes"], Int[np.ndarray, " n"]]],
    kind: str,
    shape: tuple[int, ...],
) -> Interleaved:
    """Return a weight [D, ...] made of rows of ggml's blocks.

    Args:
      parts: rows, and the columns that they are; together all N columns.
    """
    columns, kept = math.prod(shape[1:]), []
    addresses = np.zeros(columns, np.uintp)
    for rows, places in parts:
        assert rows.strides[-1] == 1, "the blocks of a row must be contiguous"
        addresses[places] = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
        kept.append(rows)
    assert addresses.all(), "columns are missing"
    arrays = {n: _zeros(*declared) for n, declared in shapes(kind, shape[0], columns).items()}
    pointers = [arrays[n].ctypes.data if n in arrays else None for n in ORDER if n != "zero"]
    move = _function(f"dflash_repack_{kind.lower()}")
    move(addresses.ctypes.data, columns, shape[0] // RUN, *pointers)
    return Interleaved(arrays, kind, shape)


def quantise_int8(weight: Float[np.ndarray, "D ..."]) -> Interleaved:
    """Return a float weight in int8, with the numbers of `layouts.quantise`."""
    flat = np.ascontiguousarray(weight, np.float32).reshape(len(weight), -1)
    declared = shapes("int8", *flat.shape)
    arrays = {name: _zeros(*of) for name, of in declared.items()}
    pointers = [array.ctypes.data for array in arrays.values()]
    _function("dflash_quantise_int8")(flat.ctypes.data, *flat.shape, *pointers)
    return Interleaved(arrays, "int8", weight.shape)


@functools.cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(str(library().path)), name)
    arrays = 2 if name == "dflash_quantise_int8" else len(ORDER) - 1
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * arrays]
    function.restype = None
    return function


def _quads(codes: UInt8[np.ndarray, "D N"]) -> UInt8[np.ndarray, "P Q 64"]:
    padded = np.pad(codes, ((0, -len(codes) % 4), (0, -codes.shape[1] % WIDTH)))
    quads = padded.reshape(len(padded) // 4, 4, -1, WIDTH).transpose(2, 0, 3, 1)
    return quads.reshape(*quads.shape[:2], 4 * WIDTH)


def _unquads(quads: UInt8[np.ndarray, "P ..."], columns: int) -> UInt8[np.ndarray, "D N"]:
    rows = quads.reshape(len(quads), -1, WIDTH, 4).transpose(1, 3, 0, 2)
    return np.ascontiguousarray(rows.reshape(-1, len(quads) * WIDTH)[:, :columns])


def _by_strip(rows: Num[np.ndarray, "R N"]) -> Num[np.ndarray, "P R 16"]:
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % WIDTH)))
    return np.ascontiguousarray(padded.reshape(len(rows), -1, WIDTH).swapaxes(0, 1))


def _rows(strips: Num[np.ndarray, "P R 16"], columns: int) -> Num[np.ndarray, "R N"]:
    rows = strips.swapaxes(0, 1).reshape(strips.shape[1], -1)
    return np.ascontiguousarray(rows[:, :columns])


def _aligned(array: np.ndarray) -> np.ndarray:
    copy = _zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros that JAX can use in place; a large one may have huge pages."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LARGE:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
