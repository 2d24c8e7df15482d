"""Products with packed weights and with float weights of other memory layouts.

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
from jaxtyping import Array, Float, Int, Num

from dflash_jax.kernels.native import interleaved
from dflash_jax.kernels.native import products as native_products
from dflash_jax.quant.layouts import (
    FLOAT,
    KINDS,
    LAID_OUT,
    MAX_TILED_TOKENS,
    RUN,
    STACK,
    TILE_WIDTH,
    Arrays,
    ColumnMajor,
    Interleaved,
    Joined,
    Packed,
    Spec,
    StructuredWeight,
    Tiled,
    layout_of,
)

jax.tree_util.register_dataclass(
    Packed, data_fields=["arrays"], meta_fields=["kind", "shape", "kernel"]
)
jax.tree_util.register_dataclass(Joined, data_fields=["parts"], meta_fields=["axis", "shape"])
jax.tree_util.register_dataclass(
    Interleaved, data_fields=["arrays"], meta_fields=["kind", "shape", "by_floats", "stacked"]
)
jax.tree_util.register_dataclass(ColumnMajor, data_fields=["array"], meta_fields=[])
jax.tree_util.register_dataclass(Tiled, data_fields=["row_major", "tiles"], meta_fields=[])

SLICE_SIZE = 1 << 19  # weights that a CPU unpacks at a time
LANES = 128  # of a TPU's vectors
SMALL = 1 << 24  # bytes of matrices that NumPy transposes
Weight = Array | StructuredWeight
Axes = tuple[int, ...]


def contract(
    x: Float[Array, "... D"], w: StructuredWeight, *, fill: bool = True
) -> Float[Array, "..."]:
    """Return x · w over the last axis of x and the first of w, in float32.

    Args:
      fill: compute rows of zeros, too; else native kernels leave their results undefined.
    """
    if isinstance(w, Interleaved):
        return native_products.multiply(x, w, fill=fill)
    if isinstance(w, ColumnMajor):
        return _multiply_column_major(x, w)
    if isinstance(w, Tiled):
        return _multiply_tiled(x, w)
    if isinstance(w, Joined):
        parts = [
            contract(x, part) if isinstance(part, StructuredWeight) else _plain(x, part)
            for part in w.parts
        ]
        return jnp.concatenate(parts, axis=x.ndim - 2 + w.axis)
    from dflash_jax.kernels.pallas_products import (  # imports Pallas, which few plans need
        COLUMNS,
        multiply,
    )

    rows = x.reshape(-1, x.shape[-1])
    forms: dict[str, Any] = {
        "cpu": functools.partial(multiply_by_slices, kind=w.kind),
        "default": functools.partial(multiply_unpacked, kind=w.kind),
    }
    if w.kernel and w.kind != "int8" and w.arrays["codes"].shape[1] % COLUMNS == 0:
        forms["cuda"] = functools.partial(multiply, kind=w.kind)
    out = jax.lax.platform_dependent(rows, w.arrays, **forms)
    return out.reshape(*x.shape[:-1], *w.shape[1:])


def gather(w: Weight, ids: Int[Array, "*places"], dtype: jnp.dtype) -> Array:
    """Return columns of w [D, V], a transposed embedding table, as [*places, D]."""
    if isinstance(w, ColumnMajor):
        return jnp.take(w.array, ids, axis=0, mode="clip")
    if isinstance(w, Tiled) or not isinstance(w, StructuredWeight):
        table = w.row_major if isinstance(w, Tiled) else w
        return jnp.moveaxis(_take(table, ids), 0, -1)
    if isinstance(w, Interleaved):
        table = native_products.gather(w, ids.ravel())
        return table.astype(dtype).reshape(*ids.shape, w.shape[0])
    assert isinstance(w, Packed), "a table has one part"
    columns = {name: _take(a, ids.ravel()) for name, a in w.arrays.items()}
    table = unpack(columns, w.kind)
    if w.kind == "int8":
        table *= columns["scale"]
    return table.T.astype(dtype).reshape(*ids.shape, w.shape[0])


def _take(table: Num[Array, "R V"], ids: Int[Array, "*places"]) -> Num[Array, "R *places"]:
    """Return columns of a table; a TPU would transpose the whole table to gather them."""
    gathered = functools.partial(jnp.take, axis=1, mode="clip")
    return jax.lax.platform_dependent(table, ids, tpu=take_slices, default=gathered)


def take_slices(table: Num[Array, "R V"], ids: Int[Array, "*places"]) -> Num[Array, "R *places"]:
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
    depth, columns = x.shape[1], arrays["codes"].shape[1]
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
    k, codes = KINDS[kind], arrays["codes"]
    n, columns = k.classes, codes.shape[1]
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
    size, exponent = code & 7, code >> 1 & 3
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


def _multiply_column_major(x: Float[Array, "... D"], w: ColumnMajor) -> Float[Array, "..."]:
    """Multiply with the weight first; XLA would transpose it in every call for x · w."""
    rows, columns = x.reshape(-1, x.shape[-1]), w.array.reshape(-1, x.shape[-1])
    out = _dot(columns, rows, ((1,), (1,)))
    out = jax.lax.optimization_barrier(out)  # or XLA makes x · w of the transposed product
    return out.T.reshape(*x.shape[:-1], *w.shape[1:])


def _multiply_tiled(x: Float[Array, "... D"], w: Tiled) -> Float[Array, "..."]:
    """Multiply tile by tile; for one token and for many, x · w is as fast."""
    rows, count = x.reshape(-1, x.shape[-1]), math.prod(w.shape[1:])
    if not 1 < len(rows) <= MAX_TILED_TOKENS:
        return _plain(x, w.row_major)
    each = jnp.broadcast_to(rows, (len(w.tiles), *rows.shape))
    out = _dot(each, w.tiles, ((2,), (1,)), ((0,), (0,)))  # [P, M, TILE_WIDTH]
    out = out.swapaxes(0, 1).reshape(len(rows), -1)[:, :count]
    return out.reshape(*x.shape[:-1], *w.shape[1:])


def _plain(x: Float[Array, "... D"], w: Float[Array, "D ..."]) -> Float[Array, "..."]:
    return _dot(x, w, ((x.ndim - 1,), (0,)))


def _dot(
    x: Array, y: Array, over: tuple[Axes, Axes], along: tuple[Axes, Axes] = ((), ())
) -> Float[Array, "..."]:
    wide = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        y,
        (over, along),
        precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def choose_products(params: Any, kernels: str, activations: str) -> Any:
    """Return a parameter tree whose packed weights are multiplied as these fields of a plan say."""

    def choose(leaf: Any) -> Any:
        if isinstance(leaf, Packed):
            return dataclasses.replace(leaf, kernel=kernels != "xla")
        if isinstance(leaf, Interleaved) and leaf.kind == "int8":
            return dataclasses.replace(leaf, by_floats=activations == "float")
        return leaf

    return jax.tree.map(choose, params, is_leaf=lambda leaf: isinstance(leaf, Packed | Interleaved))


def abstract_stack(shape: tuple[int, ...], kind: str, dtype: jnp.dtype) -> Interleaved:
    """Return the shapes of a stack [E, D, ...] in strips; arguments as for `interleaved.shapes`."""
    declared = interleaved.stack_shapes(kind, shape, dtype)
    arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in declared.items()}
    return Interleaved(arrays, kind, shape, stacked=True)


def set_weight_layout(
    params: dict[str, Any],
    layout: str,
    forms: Mapping[str, str],
    path: tuple[str, ...] = (),
) -> None:
    """Store the matrices [D, ...] and stacks of a parameter tree in a layout, in place.

    One matrix at a time, so that no more memory is needed than for the largest. NumPy transposes
    small matrices, as compiling an operation for their shape takes longer.

    Args:
      layout: `Plan.weight_layout`. Packed matrices have a layout of their own, or are interleaved;
        then parameters that are not matrices become float32.
      forms: of the weights that are declared, by path. All parameters of a model that declares
        none stay as they are.
      path: of the tree.
    """
    for name, leaf in params.items():
        at = (*path, name)
        if isinstance(leaf, dict):
            if path or any(declared.startswith(f"{name}/") for declared in forms):
                set_weight_layout(leaf, layout, forms, at)
            continue
        form = forms.get("/".join(at), FLOAT)
        widened = layout == "interleaved" and form == FLOAT
        if form in LAID_OUT:
            params[name] = _relaid(leaf, layout_of(layout, leaf.shape))
        elif form == STACK:
            params[name] = _relaid_stack(leaf, layout)
        elif widened and jnp.issubdtype(leaf.dtype, jnp.floating):
            params[name] = leaf.astype(jnp.float32)


def _relaid(leaf: Any, wanted: type[Any] | None) -> Any:
    if isinstance(leaf, Joined):
        return dataclasses.replace(leaf, parts=tuple(_relaid(part, wanted) for part in leaf.parts))
    if isinstance(leaf, Packed):
        return interleaved.interleave(leaf) if wanted is Interleaved else leaf
    if wanted and isinstance(leaf, wanted):
        return leaf
    if isinstance(leaf, Interleaved) and leaf.kind != FLOAT:
        return interleaved.deinterleave(leaf)
    if wanted is None and not isinstance(leaf, StructuredWeight):
        return leaf
    if wanted is Interleaved:
        return interleaved.from_floats(np.asarray(leaf))
    small = isinstance(leaf, np.ndarray) and leaf.nbytes <= SMALL
    matrix = leaf if small else _row_major(leaf)
    return jax.block_until_ready(_laid_out(matrix, wanted))


def _relaid_stack(leaf: Any, layout: str) -> Any:
    """Return a stack [E, D, ...] in strips, or as an array of floats."""
    if layout == "interleaved":
        return leaf if isinstance(leaf, Interleaved) else interleaved.stack_floats(np.asarray(leaf))
    return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, Interleaved) else leaf


def abstract_layout(w: Any, layout: str) -> Any:
    """Return the shapes of a matrix [D, ...] stored in a layout; arguments as above."""
    if isinstance(w, Joined):
        parts = (abstract_layout(part, layout) for part in w.parts)
        return dataclasses.replace(w, parts=tuple(parts))
    wanted = layout_of(layout, w.shape)
    if wanted is Interleaved:
        kind = w.kind if isinstance(w, Packed) else FLOAT
        dtype = None if kind else w.dtype
        declared = interleaved.shapes(kind, w.shape[0], math.prod(w.shape[1:]), dtype)
        arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in declared.items()}
        return Interleaved(arrays, kind, w.shape)
    if isinstance(w, Packed) or wanted is None:
        return w
    return jax.eval_shape(functools.partial(_laid_out, wanted=wanted), w)


def _laid_out(w: Array | np.ndarray, wanted: type[Any] | None) -> Any:
    module: Any = np if isinstance(w, np.ndarray) else jnp
    if wanted is ColumnMajor:
        return ColumnMajor(module.moveaxis(w, 0, -1))
    if wanted is Tiled:
        flat = w.reshape(len(w), -1)
        flat = module.pad(flat, ((0, 0), (0, -flat.shape[1] % TILE_WIDTH)))
        return Tiled(w, flat.reshape(len(w), -1, TILE_WIDTH).swapaxes(0, 1))
    return w


def _row_major(w: Any) -> Float[Array, "D ..."]:
    if isinstance(w, ColumnMajor):
        return jnp.moveaxis(w.array, -1, 0)
    if isinstance(w, Interleaved):
        return jnp.asarray(np.asarray(w))
    return w.row_major if isinstance(w, Tiled) else jnp.asarray(w)
