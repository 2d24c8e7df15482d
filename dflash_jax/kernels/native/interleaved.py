"""Weights in strips of 16 columns, the layout of the native kernels; NumPy moves them.

All arrays of a weight [D, N] begin with its strips, the last of which is padded with zeros:

| kind | arrays |
| --- | --- |
| floats | `values` [strips, D, 16] |
| int8 | `codes` + 128 [strips, D / 4, 64], four codes of each column; `scale` [strips, 16] |
| others | `codes` [strips, D / 32, bytes of a group], `scale`, and others of `Packed`, [.., 16] |

`formats.h` describes the codes of a group. The arrays of a stack [E, D, N] are those of its
matrices, one after the other.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num, UInt8

from dflash_jax.quant.formats import KINDS, RUN
from dflash_jax.quant.layouts import FLOAT, Arrays, Interleaved, Packed, join, split
from dflash_jax.utils.allocator import zeros

WIDTH = 16  # columns of a strip
ORDER = ("codes", "scale", "low", "zero", "sub", "sub_low")  # order of the kernels' arguments
# Types whose blocks the native library moves.
MOVED = frozenset(
    ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
)
# Where the high bits of codes lie, by the bits of a code: of each place in the bytes behind the
# nibbles, its first bit, and the quads whose bits these bytes have there.
HIGH = {
    4: (),
    5: tuple((quad, (quad,)) for quad in range(8)),
    6: ((0, (0, 2)), (2, (4, 6)), (4, (1, 3)), (6, (5, 7))),
}
PART = 1 << 23  # bytes of rows that are put in place at a time


def shapes(
    kind: str, depth: int, columns: int, dtype: Any = None
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array of a weight [D, N], in `ORDER`.

    Args:
      dtype: dtype of floats.
    """
    strips = -(-columns // WIDTH)
    if kind == FLOAT:
        return {"values": ((strips, depth, WIDTH), dtype)}
    format_ = KINDS[kind]
    if kind == "int8":
        codes = (strips, -(-depth // 4), 4 * WIDTH)
        return {"codes": (codes, np.uint8), "scale": ((strips, WIDTH), np.float32)}
    group = RUN * WIDTH * format_.bits // 8
    layouts: dict[str, tuple[tuple[int, ...], Any]] = {
        "codes": ((strips, depth // RUN, group), np.uint8)
    }
    arrays = format_.arrays(depth)
    for name in ORDER[1:]:
        if name in arrays:
            rows, stored = arrays[name]
            layouts[name] = ((strips, rows, WIDTH), stored)
    return layouts


def interleave(w: Packed) -> Interleaved:
    """Return a packed weight in strips."""
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    format_ = KINDS[w.kind]
    depth = w.shape[0]
    if w.kind == "int8":
        codes = _quads(arrays["codes"].view(np.uint8) ^ np.uint8(128))
        return _placed({"codes": codes, "scale": _by_strip(arrays["scale"])[:, 0]}, w)
    whole = arrays["codes"].view(np.uint8)
    if format_.spread == 2:
        whole = split(whole, 2)
    if format_.high:
        whole = whole | split(arrays["high"], 4) << np.uint8(4)
    if format_.numbers:
        whole = _indices(format_.numbers)[whole]
    if format_.bits == 8:
        whole = whole ^ np.uint8(128)
    groups = _quads(whole).reshape(-1, depth // RUN, 8, 4 * WIDTH)
    codes = groups if format_.bits == 8 else _narrow(groups, format_.bits)
    moved = {"codes": codes.reshape(len(codes), depth // RUN, -1)}
    moved |= {name: _by_strip(arrays[name]) for name in ORDER[1:] if name in arrays}
    return _placed(moved, w)


def deinterleave(w: Interleaved) -> Packed:
    """Return a packed weight in the layout for XLA, the inverse of `interleave`."""
    arrays = {name: np.asarray(a) for name, a in w.arrays.items()}
    format_ = KINDS[w.kind]
    depth = w.shape[0]
    columns = math.prod(w.shape[1:])
    codes = arrays.pop("codes")
    rows_by_name = {n: _rows(a.reshape(len(a), -1, WIDTH), columns) for n, a in arrays.items()}
    if format_.bits == 8:
        whole = _unquads(codes, columns)[:depth] ^ np.uint8(128)
    else:
        groups = codes.reshape(len(codes), depth // RUN, -1, 4 * WIDTH)
        whole = _unquads(_widened(groups, format_.bits), columns)
    if format_.numbers:
        whole = np.array(format_.numbers, np.int8)[whole]
    if format_.spread == 1:
        rows_by_name["codes"] = whole.view(np.int8)
    else:
        rows_by_name["codes"] = join(whole & np.uint8(15), 2)
    if format_.high:
        rows_by_name["high"] = join(whole >> np.uint8(4), 4)
    return Packed({name: rows_by_name[name] for name in format_.arrays(depth)}, w.kind, w.shape)


def stack_shapes(
    kind: str, shape: tuple[int, ...], dtype: Any = None
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array of a stack [E, D, ...]; arguments as above."""
    experts, depth, *columns = shape
    each = shapes(kind, depth, math.prod(columns), dtype)
    return {name: ((experts, *of), stored) for name, (of, stored) in each.items()}


def empty(kind: str, shape: tuple[int, ...]) -> Interleaved:
    """Return a packed weight [D, ...] of zeros, whose columns are put in place later."""
    declared = shapes(kind, shape[0], math.prod(shape[1:]))
    return Interleaved({name: zeros(*of) for name, of in declared.items()}, kind, shape)


def empty_stack(kind: str, shape: tuple[int, ...], dtype: Any = None) -> Interleaved:
    """Return a stack [E, D, ...] of zeros, whose matrices are put in place later."""
    declared = stack_shapes(kind, shape, dtype)
    return Interleaved(
        {name: zeros(*of) for name, of in declared.items()}, kind, shape, stacked=True
    )


def put_blocks(
    w: Interleaved,
    rows: UInt8[np.ndarray, "n bytes"],
    columns: Int[np.ndarray, " n"],
    type_: str,
    moved: Callable[[], object] = lambda: None,
) -> None:
    """Put rows of ggml's blocks in place as columns of a packed weight, some strips at a time.

    Args:
      type_: type of the blocks, one of `MOVED`.
      moved: called after each of these times.
    """
    assert rows.strides[-1] == 1, "the blocks of a row must be contiguous"
    addresses = np.zeros(math.prod(w.shape[1:]), np.uintp)
    addresses[columns] = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
    arrays = [w.arrays.get(name) for name in ORDER if name != "zero"]
    step = max(PART // (rows.shape[1] * WIDTH), 1)
    for first in range(0, -(-len(addresses) // WIDTH), step):
        some = addresses[first * WIDTH : (first + step) * WIDTH]
        if some.any():
            places = [None if a is None else a[first : first + step] for a in arrays]
            _call(f"repack_{type_.lower()}", some, len(some), w.shape[0] // RUN, *places)
            moved()


def put_packed(w: Interleaved, part: Packed, columns: Int[np.ndarray, " n"]) -> None:
    """Put the columns of a packed weight in place as columns of another, of the same kind."""
    strips = columns // WIDTH
    places = columns % WIDTH
    for name, array in interleave(part).arrays.items():
        size = 4 if name == "codes" else 1  # of the numbers of a column that lie side by side
        each = array.reshape(len(array), -1, WIDTH, size).swapaxes(1, 2)
        each = each.reshape(-1, *each.shape[2:])[: len(columns)]
        to = w.arrays[name]
        to.reshape(len(to), -1, WIDTH, size)[strips, :, places] = each


def from_floats(weight: Float[np.ndarray, "D ..."]) -> Interleaved:
    """Return a float weight in strips."""
    [(shape, dtype)] = shapes(
        FLOAT, len(weight), math.prod(weight.shape[1:]), weight.dtype
    ).values()
    strips = zeros(shape, dtype)
    _put_floats(weight, strips)
    return Interleaved({"values": strips}, FLOAT, weight.shape)


def stack_floats(weights: Float[np.ndarray, "E D ..."]) -> Interleaved:
    """Return a stack of float weights in strips."""
    made = empty_stack(FLOAT, weights.shape, weights.dtype)
    for weight, strips in zip(weights, made.arrays["values"], strict=True):
        _put_floats(weight, strips)
    return made


def _put_floats(weight: Float[np.ndarray, "D ..."], strips: Float[np.ndarray, "P D 16"]) -> None:
    flat = np.ascontiguousarray(weight).reshape(len(weight), -1)
    row = flat.shape[1] * flat.itemsize
    strip = WIDTH * flat.itemsize
    _call("interleave", flat, len(flat), row, strip, strips)


def quantise_int8(weight: Float[np.ndarray, "D ..."]) -> Interleaved:
    """Return a float weight in int8, with the numbers of `layouts.quantise`."""
    flat = np.ascontiguousarray(weight, np.float32).reshape(len(weight), -1)
    declared = shapes("int8", *flat.shape)
    arrays = {name: zeros(*of) for name, of in declared.items()}
    _call("quantise_int8", flat, *flat.shape, *arrays.values())
    return Interleaved(arrays, "int8", weight.shape)


def _call(name: str, *arguments: np.ndarray | int | None) -> None:
    """Call a function of the native library with arrays, which may be absent, and numbers."""

    def passed(argument: np.ndarray | int | None) -> ctypes.c_int64 | ctypes.c_void_p:
        if isinstance(argument, int):
            return ctypes.c_int64(argument)
        return ctypes.c_void_p(None if argument is None else argument.ctypes.data)

    _library()[f"dflash_{name}"](*map(passed, arguments))


@functools.cache
def _library() -> ctypes.CDLL:
    from dflash_jax.kernels.native.build import library  # imports JAX, which converters do not

    return ctypes.CDLL(str(library().path))


def _quads(codes: UInt8[np.ndarray, "D N"]) -> UInt8[np.ndarray, "P Q 64"]:
    padded = np.pad(codes, ((0, -len(codes) % 4), (0, -codes.shape[1] % WIDTH)))
    quads = padded.reshape(len(padded) // 4, 4, -1, WIDTH).transpose(2, 0, 3, 1)
    return quads.reshape(*quads.shape[:2], 4 * WIDTH)


def _unquads(quads: UInt8[np.ndarray, "P ..."], columns: int) -> UInt8[np.ndarray, "D N"]:
    rows = quads.reshape(len(quads), -1, WIDTH, 4).transpose(1, 3, 0, 2)
    return np.ascontiguousarray(rows.reshape(-1, len(quads) * WIDTH)[:, :columns])


def _indices(numbers: tuple[int, ...]) -> UInt8[np.ndarray, "256"]:
    """Return the code of each signed byte that is one of some numbers, by its unsigned value."""
    codes = np.zeros(256, np.uint8)
    codes[np.array(numbers, np.int8).view(np.uint8)] = np.arange(len(numbers))
    return codes


def _narrow(groups: UInt8[np.ndarray, "P G 8 64"], bits: int) -> UInt8[np.ndarray, "P G Q 64"]:
    """Return the bytes of groups from their codes of 4, 5 or 6 bits."""
    low = groups & np.uint8(15)
    high = groups >> np.uint8(4)
    parts = [low[:, :, :4] | low[:, :, 4:] << np.uint8(4)]
    if HIGH[bits]:
        places = (high[:, :, list(quads)] << np.uint8(bit) for bit, quads in HIGH[bits])
        parts.append(functools.reduce(np.bitwise_or, places))
    return np.concatenate(parts, axis=2)


def _widened(groups: UInt8[np.ndarray, "P G Q 64"], bits: int) -> UInt8[np.ndarray, "P G 8 64"]:
    """Return the codes of groups, the inverse of `_narrow`."""
    low = groups[:, :, :4]
    codes = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=2)
    mask = np.uint8((1 << bits - 4) - 1)
    for bit, quads in HIGH[bits]:
        codes[:, :, list(quads)] |= (groups[:, :, 4:] >> np.uint8(bit) & mask) << np.uint8(4)
    return codes


def _by_strip(rows: Num[np.ndarray, "R N"]) -> Num[np.ndarray, "P R 16"]:
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % WIDTH)))
    return np.ascontiguousarray(padded.reshape(len(rows), -1, WIDTH).swapaxes(0, 1))


def _rows(strips: Num[np.ndarray, "P R 16"], columns: int) -> Num[np.ndarray, "R N"]:
    rows = strips.swapaxes(0, 1).reshape(strips.shape[1], -1)
    return np.ascontiguousarray(rows[:, :columns])


def _placed(arrays: Arrays, w: Packed) -> Interleaved:
    copies = {name: zeros(array.shape, array.dtype) for name, array in arrays.items()}
    for name, array in arrays.items():
        copies[name][...] = array
    return Interleaved(copies, w.kind, w.shape)
