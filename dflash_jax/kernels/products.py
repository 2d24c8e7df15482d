"""Products with packed weights, and the memory layout of weights.

A packed weight is never held in memory unpacked. On a CPU a slice of columns is unpacked at a
time. On a GPU the Pallas kernel unpacks in registers; without it, and for int8, whose scale is
applied after the product, XLA fuses the whole expression. All three multiply the same rounded
weights, so they differ only in the order of summation.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from dflash_jax.kernels.native import interleaved
from dflash_jax.kernels.native import products as native_products
from dflash_jax.quant.layouts import (
    FLOAT,
    KINDS,
    LAID_OUT,
    RUN,
    STACK,
    Arrays,
    Interleaved,
    Joined,
    Packed,
    Spec,
    StructuredWeight,
)

jax.tree_util.register_dataclass(
    Packed, data_fields=["arrays"], meta_fields=["kind", "shape", "kernel"]
)
jax.tree_util.register_dataclass(Joined, data_fields=["parts"], meta_fields=["axis", "shape"])
jax.tree_util.register_dataclass(
    Interleaved, data_fields=["arrays"], meta_fields=["kind", "shape", "by_floats", "stacked"]
)

SLICE_SIZE = 1 << 19  # weights that a CPU unpacks at a time
LANES = 128  # length of a TPU's vectors
Weight = Array | StructuredWeight


def contract(
    x: Float[Array, "... D"], w: Weight, live: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Return x · w over the last axis of x and the first of w, in float32.

    Args:
      live: rows of x that count; results of the others are undefined. By default all do.
    """
    return _product(w, x, live)


@functools.singledispatch
def _product(
    w: Any, x: Float[Array, "... D"], live: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    """Return the product with a weight of this form; here with an array."""
    return _plain(x, w)


@_product.register(Interleaved)
def _interleaved_product(
    w: Interleaved, x: Float[Array, "... D"], live: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    return native_products.multiply(x, w, live=live)


@_product.register(Joined)
def _joined_product(
    w: Joined, x: Float[Array, "... D"], live: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    parts = [contract(x, part) for part in w.parts]
    return jnp.concatenate(parts, axis=x.ndim - 2 + w.axis)


@_product.register(Packed)
def _packed_product(
    w: Packed, x: Float[Array, "... D"], live: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    from dflash_jax.kernels.pallas_products import (  # imports Pallas, which few plans need
        COLUMNS,
        multiply,
    )

    rows = x.reshape(-1, x.shape[-1])
    by_slices = functools.partial(multiply_by_slices, kind=w.kind)
    unpacked = functools.partial(multiply_unpacked, kind=w.kind)
    if w.kernel and w.kind != "int8" and w.arrays["codes"].shape[1] % COLUMNS == 0:
        by_kernel = functools.partial(multiply, kind=w.kind)
        out = jax.lax.platform_dependent(
            rows, w.arrays, cpu=by_slices, cuda=by_kernel, default=unpacked
        )
    else:
        out = jax.lax.platform_dependent(rows, w.arrays, cpu=by_slices, default=unpacked)
    return out.reshape(*x.shape[:-1], *w.shape[1:])


def gather(w: Weight, ids: Int[Array, "*positions"], dtype: jnp.dtype) -> Array:
    """Return columns of a transposed embedding table w [D, V], as [*positions, D].

    Args:
      dtype: dtype of the columns of a packed table.
    """
    return _columns(w, ids, dtype)


@functools.singledispatch
def _columns(w: Any, ids: Int[Array, "*positions"], dtype: jnp.dtype) -> Array:
    """Return columns of a table of this form, which has one part; here of an array."""
    return jnp.moveaxis(_take(w, ids), 0, -1)


@_columns.register(Interleaved)
def _interleaved_columns(w: Interleaved, ids: Int[Array, "*positions"], dtype: jnp.dtype) -> Array:
    table = native_products.gather(w, ids.ravel())
    return table.astype(dtype).reshape(*ids.shape, w.shape[0])


@_columns.register(Packed)
def _packed_columns(w: Packed, ids: Int[Array, "*positions"], dtype: jnp.dtype) -> Array:
    columns = {name: _take(a, ids.ravel()) for name, a in w.arrays.items()}
    table = unpack(columns, w.kind)
    if w.kind == "int8":
        table *= columns["scale"]
    return table.T.astype(dtype).reshape(*ids.shape, w.shape[0])


def _take(table: Num[Array, "R V"], ids: Int[Array, "*positions"]) -> Num[Array, "R *positions"]:
    """Return columns of a table; a TPU would transpose the whole table to gather them."""
    gathered = functools.partial(jnp.take, axis=1, mode="clip")
    return jax.lax.platform_dependent(table, ids, tpu=take_slices, default=gathered)


def take_slices(
    table: Num[Array, "R V"], ids: Int[Array, "*positions"]
) -> Num[Array, "R *positions"]:
    """Return columns of a table, one slice after the other; ids past its ends are clipped.

    With fewer than `LANES` columns to write, XLA would transpose the table for the loop.
    """
    each = jnp.clip(ids.ravel(), 0, table.shape[1] - 1)

    def copy(i: Int[Array, ""], taken: Num[Array, "R P"]) -> Num[Array, "R P"]:
        column = jax.lax.dynamic_slice_in_dim(table, each[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(taken, column, i, axis=1)

    empty = jnp.zeros((len(table), -(-each.size // LANES) * LANES), table.dtype)
    taken = jax.lax.fori_loop(0, each.size, copy, empty)
    return taken[:, : each.size].reshape(len(table), *ids.shape)


def abstract(shape: tuple[int, ...], spec: Spec, dtype: jnp.dtype) -> Packed | Joined:
    """Return the shapes of a weight [D, ...] packed by a specification.

    Args:
      dtype: dtype of the parts that are not packed.
    """
    axis, parts = spec
    shapes: list[Any] = []
    for kind, width in parts:
        part = (*shape[:axis], width, *shape[axis + 1 :])
        columns = part[1:]
        if not kind:
            shapes.append(jax.ShapeDtypeStruct(part, dtype))
            continue
        count = functools.reduce(int.__mul__, columns, 1)
        arrays = {
            name: jax.ShapeDtypeStruct((rows, count), jnp.dtype(stored))
            for name, (rows, stored) in KINDS[kind].arrays(shape[0]).items()
        }
        shapes.append(Packed(arrays, kind, part))
    return shapes[0] if len(shapes) == 1 else Joined(tuple(shapes), axis, shape)


def multiply_unpacked(x: Float[Array, "M D"], arrays: Arrays, *, kind: str) -> Float[Array, "M N"]:
    """Return the product as one expression for XLA to fuse, in float32."""
    if kind == "int8":  # through float32 XLA would write the unpacked weight to memory
        return _plain(x, arrays["codes"].astype(x.dtype)) * arrays["scale"]
    runs = x.reshape(len(x), -1, KINDS[kind].classes, RUN)
    parts = [
        _plain(runs[:, :, i].reshape(len(x), -1), w.astype(x.dtype).reshape(-1, w.shape[2]))
        for i, w in enumerate(_planes(arrays, kind))
    ]
    return functools.reduce(jnp.add, parts)


def multiply_by_slices(x: Float[Array, "M D"], arrays: Arrays, *, kind: str) -> Float[Array, "M N"]:
    """Return the product, slice of columns by slice. The last slices may overlap."""
    depth = x.shape[1]
    columns = arrays["codes"].shape[1]
    width = max(64, SLICE_SIZE // depth // 64 * 64)
    if columns <= width:
        return multiply_unpacked(x, arrays, kind=kind)

    def tile(i: Int[Array, ""], out: Float[Array, "M N"]) -> Float[Array, "M N"]:
        start = jnp.minimum(i * width, columns - width)
        part = {
            name: jax.lax.dynamic_slice_in_dim(a, start, width, axis=1)
            for name, a in arrays.items()
        }
        return jax.lax.dynamic_update_slice_in_dim(
            out, multiply_unpacked(x, part, kind=kind), start, axis=1
        )

    out = jnp.zeros((x.shape[0], columns), jnp.float32)
    return jax.lax.fori_loop(0, -(-columns // width), tile, out)


def unpack(arrays: Arrays, kind: str) -> Float[Array, "D N"]:
    """Return float32 weights; int8 weights are not scaled yet."""
    if kind == "int8":
        return arrays["codes"].astype(jnp.float32)
    planes = jnp.stack(list(_planes(arrays, kind)), axis=1)  # [Q, classes, RUN, N]
    return planes.reshape(-1, planes.shape[3])


def _planes(arrays: Arrays, kind: str) -> Iterator[Float[Array, "Q R N"]]:
    """Yield float32 weights of the first, the second, ... of the runs that share bytes.

    Restoring the order of the runs would take a copy, so the product reorders its inputs instead.
    """
    k = KINDS[kind]
    codes = arrays["codes"]
    n = k.classes
    columns = codes.shape[1]
    shared = codes.reshape(-1, n // k.spread, RUN, columns)
    for run in range(n):
        code = shared[:, run // k.spread]
        if k.spread == 2:
            code = code >> jnp.uint8(4 * (run % 2)) & jnp.uint8(15)
        if k.high:
            high = arrays["high"].reshape(-1, RUN, columns)
            code = code | (high >> jnp.uint8(2 * run) & jnp.uint8(3)) << jnp.uint8(4)
        w = of_code(code) if k.floats else code
        w = w.astype(jnp.float32) - jnp.float32(k.zero)
        if k.zeros:
            w -= _of_run(arrays, "zero", "", len(w), run, n)
        w *= _of_run(arrays, "scale", "sub", len(w), run, n)
        if "low" in arrays:
            w -= _of_run(arrays, "low", "sub_low", len(w), run, n)
        yield w


def of_code(code: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the numbers of `E2M1` that codes stand for, without a table."""
    code = code.astype(jnp.int32)
    size = code & 7
    exponent = code >> 1 & 3
    size = jnp.where(exponent > 1, (code & 1 | 2) << jnp.maximum(exponent - 1, 0), size)
    return jnp.where(code > 7, -size, size)


def _of_run(
    arrays: Arrays, scale: str, sub: str, count: int, run: int, classes: int
) -> Float[Array, "Q R N"]:
    """Return the factor of each weight of one plane."""

    def spread(name: str) -> Float[Array, "Q R N"]:
        groups = arrays[name].astype(jnp.float32)
        columns = groups.shape[1]
        if len(groups) >= count * classes:  # one or more for each run
            of_run = groups.reshape(count, classes, -1, 1, columns)[:, run]
            each = (count, of_run.shape[1], RUN // of_run.shape[1], columns)
            return jnp.broadcast_to(of_run, each).reshape(count, RUN, columns)
        each = (len(groups), count // len(groups), RUN, columns)
        return jnp.broadcast_to(groups[:, None, None], each).reshape(count, RUN, columns)

    return spread(scale) * spread(sub) if sub in arrays else spread(scale)


def _plain(x: Float[Array, "... D"], w: Float[Array, "D ..."]) -> Float[Array, "..."]:
    wide = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def choose_products(params: Any, kernels: str, activations: str) -> Any:
    """Return a parameter tree whose packed weights are multiplied as these fields of a plan say."""

    def choose(leaf: Any) -> Any:
        return _with_product(leaf, kernels, activations)

    return jax.tree.map(choose, params, is_leaf=lambda leaf: isinstance(leaf, Packed | Interleaved))


@functools.singledispatch
def _with_product(leaf: Any, kernels: str, activations: str) -> Any:
    """Return a weight of this form with the product that a plan chooses; arrays have only one."""
    return leaf


@_with_product.register(Packed)
def _packed_with_product(leaf: Packed, kernels: str, activations: str) -> Packed:
    return dataclasses.replace(leaf, kernel=kernels != "xla")


@_with_product.register(Interleaved)
def _interleaved_with_product(leaf: Interleaved, kernels: str, activations: str) -> Interleaved:
    if leaf.kind != "int8":
        return leaf
    return dataclasses.replace(leaf, by_floats=activations == "float")


def abstract_stack(shape: tuple[int, ...], kind: str, dtype: jnp.dtype) -> Interleaved:
    """Return the shapes of a stack [E, D, ...] in strips; arguments as for `interleaved.shapes`."""
    declared = interleaved.stack_shapes(kind, shape, dtype)
    arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in declared.items()}
    return Interleaved(arrays, kind, shape, stacked=True)


def set_weight_layout(
    params: dict[str, Any],
    forms: Mapping[str, str],
    path: tuple[str, ...] = (),
    *,
    native: bool,
) -> None:
    """Store the matrices [D, ...] and stacks of a parameter tree as kernels want them, in place.

    One matrix at a time, so that no more memory is needed than for the largest.

    Args:
      forms: forms of the weights that are declared, by path. All parameters of a model that
        declares none stay as they are.
      path: path of the tree.
      native: for native kernels: matrices and stacks are interleaved, and parameters that are
        neither become float32. Otherwise floats are plain arrays, and packed ones row-major.
    """
    for name, leaf in params.items():
        at = (*path, name)
        if isinstance(leaf, dict):
            if path or any(declared.startswith(f"{name}/") for declared in forms):
                set_weight_layout(leaf, forms, at, native=native)
            continue
        form = forms.get("/".join(at), FLOAT)
        if form in LAID_OUT:
            params[name] = _interleaved(leaf) if native else _row_major(leaf)
        elif form == STACK:
            params[name] = _interleaved_stack(leaf) if native else _stack_of_floats(leaf)
        elif native and jnp.issubdtype(leaf.dtype, jnp.floating):
            params[name] = leaf.astype(jnp.float32)


@functools.singledispatch
def _interleaved(leaf: Any) -> Interleaved | Joined:
    """Return a matrix of this form in strips; here an array of floats."""
    return interleaved.from_floats(np.asarray(leaf))


@_interleaved.register(Interleaved)
def _still_interleaved(leaf: Interleaved) -> Interleaved:
    return leaf


@_interleaved.register(Packed)
def _packed_interleaved(leaf: Packed) -> Interleaved:
    return interleaved.interleave(leaf)


@_interleaved.register(Joined)
def _joined_interleaved(leaf: Joined) -> Joined:
    return dataclasses.replace(leaf, parts=tuple(map(_interleaved, leaf.parts)))


@functools.singledispatch
def _row_major(leaf: Any) -> Any:
    """Return a matrix of this form in rows; arrays and packed matrices are."""
    return leaf


@_row_major.register(Interleaved)
def _interleaved_row_major(leaf: Interleaved) -> Any:
    if leaf.kind != FLOAT:
        return interleaved.deinterleave(leaf)
    return jax.block_until_ready(jnp.asarray(np.asarray(leaf)))


@_row_major.register(Joined)
def _joined_row_major(leaf: Joined) -> Joined:
    return dataclasses.replace(leaf, parts=tuple(map(_row_major, leaf.parts)))


def _interleaved_stack(leaf: Any) -> Interleaved:
    """Return a stack [E, D, ...] in strips."""
    return leaf if isinstance(leaf, Interleaved) else interleaved.stack_floats(np.asarray(leaf))


def _stack_of_floats(leaf: Any) -> Any:
    """Return a stack [E, D, ...] as an array of floats."""
    return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, Interleaved) else leaf


@functools.singledispatch
def abstract_interleaved(w: Any) -> Interleaved | Joined:
    """Return the shapes of a matrix [D, ...] that is interleaved.

    Args:
      w: shapes of the matrix in another form.
    """
    return _abstract_strips(FLOAT, w.shape, w.dtype)


@abstract_interleaved.register(Packed)
def _abstract_packed_interleaved(w: Packed) -> Interleaved:
    return _abstract_strips(w.kind, w.shape, None)


@abstract_interleaved.register(Joined)
def _abstract_joined_interleaved(w: Joined) -> Joined:
    return dataclasses.replace(w, parts=tuple(map(abstract_interleaved, w.parts)))


def _abstract_strips(kind: str, shape: tuple[int, ...], dtype: Any) -> Interleaved:
    declared = interleaved.shapes(kind, shape[0], math.prod(shape[1:]), dtype)
    arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in declared.items()}
    return Interleaved(arrays, kind, shape)
