"""Products with weights that are more than an array.

Those with packed ones never hold the unpacked weight in memory. On a CPU a few columns are unpacked
at a time. On a GPU the Pallas kernel unpacks in registers; without it XLA is given the whole
expression to fuse, as it is for int8, whose scale follows the product. All three multiply the same
rounded weights, so they differ in the order of sums only.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.quant.layouts import (
    FEW,
    KEPT,
    KINDS,
    ORDERED,
    PANEL,
    RUN,
    Arrays,
    Joined,
    Packed,
    Panels,
    Spec,
    Transposed,
    is_matrix,
    order_of,
)

jax.tree_util.register_dataclass(
    Packed, data_fields=["arrays"], meta_fields=["kind", "shape", "kernel"]
)
jax.tree_util.register_dataclass(Joined, data_fields=["parts"], meta_fields=["axis", "shape"])
jax.tree_util.register_dataclass(Transposed, data_fields=["array"], meta_fields=[])
jax.tree_util.register_dataclass(Panels, data_fields=["whole", "panels"], meta_fields=[])

TILE = 1 << 19  # weights unpacked at a time on a CPU
SMALL = 1 << 24  # bytes of a matrix that NumPy puts in order
Weight = Array | KEPT
Axes = tuple[int, ...]


def contract(x: Float[Array, "... D"], w: KEPT) -> Float[Array, "..."]:
    """x · w over the last axis of x and the first of w, float32."""
    if isinstance(w, Transposed):
        return _weight_first(x, w)
    if isinstance(w, Panels):
        return _by_panels(x, w)
    if isinstance(w, Joined):
        parts = [
            contract(x, part) if isinstance(part, Packed | Joined) else _plain(x, part)
            for part in w.parts
        ]
        return jnp.concatenate(parts, axis=x.ndim - 2 + w.axis)
    from dflash_jax.quant.kernel import COLUMNS, multiply  # Pallas: few plans need it

    rows = x.reshape(-1, x.shape[-1])
    tiles, whole = (functools.partial(f, kind=w.kind) for f in (by_tile, at_once))
    if w.kernel and w.kind != "int8" and w.arrays["codes"].shape[1] % COLUMNS == 0:
        kernel = functools.partial(multiply, kind=w.kind)
        out = jax.lax.platform_dependent(rows, w.arrays, cpu=tiles, cuda=kernel, default=whole)
    else:
        out = jax.lax.platform_dependent(rows, w.arrays, cpu=tiles, default=whole)
    return out.reshape(*x.shape[:-1], *w.shape[1:])


def gather(w: Weight, ids: Int[Array, "*places"], dtype: jnp.dtype) -> Array:
    """Columns of w [D, V]: rows of the embedding table it is the transpose of, [*places, D]."""
    if isinstance(w, Transposed):
        return jnp.take(w.array, ids, axis=0, mode="clip")
    if isinstance(w, Panels) or not isinstance(w, KEPT):
        whole = w.whole if isinstance(w, Panels) else w
        return jnp.moveaxis(jnp.take(whole, ids, axis=1, mode="clip"), 0, -1)
    assert isinstance(w, Packed), "a table has one part"
    columns = {name: jnp.take(a, ids.ravel(), axis=1, mode="clip") for name, a in w.arrays.items()}
    table = unpack(columns, w.kind)
    if w.kind == "int8":
        table *= columns["scale"]
    return table.T.astype(dtype).reshape(*ids.shape, w.shape[0])


def abstract(
    shape: tuple[int, ...], spec: Spec, dtype: jnp.dtype, *, kernel: bool = False
) -> Packed | Joined:
    """The shapes of a weight [D, ...] packed by a specification; other parts are of `dtype`."""
    axis, parts = spec
    made: list[Any] = []
    for kind, width in parts:
        part = (*shape[:axis], width, *shape[axis + 1 :])
        columns = part[1:]
        if not kind:
            made.append(jax.ShapeDtypeStruct(part, dtype))
            continue
        count = functools.reduce(int.__mul__, columns, 1)
        arrays = {
            name: jax.ShapeDtypeStruct((rows, count), jnp.dtype(stored))
            for name, (rows, stored) in KINDS[kind].arrays(shape[0]).items()
        }
        made.append(Packed(arrays, kind, part, kernel))
    return made[0] if len(made) == 1 else Joined(tuple(made), axis, shape)


def at_once(x: Float[Array, "M D"], arrays: Arrays, *, kind: str) -> Float[Array, "M N"]:
    """The product as one expression, float32."""
    if kind == "int8":  # by way of float32 XLA would write the unpacked weight to memory
        return _plain(x, arrays["codes"].astype(x.dtype)) * arrays["scale"]
    runs = x.reshape(len(x), -1, KINDS[kind].classes, RUN)
    parts = [
        _plain(runs[:, :, i].reshape(len(x), -1), w.astype(x.dtype).reshape(-1, w.shape[2]))
        for i, w in enumerate(_planes(arrays, kind))
    ]
    return functools.reduce(jnp.add, parts)


def by_tile(x: Float[Array, "M D"], arrays: Arrays, *, kind: str) -> Float[Array, "M N"]:
    """A few columns after the other; the last ones may be done twice."""
    depth, columns = x.shape[1], arrays["codes"].shape[1]
    width = max(64, TILE // depth // 64 * 64)
    if columns <= width:
        return at_once(x, arrays, kind=kind)

    def tile(i: Int[Array, ""], out: Float[Array, "M N"]) -> Float[Array, "M N"]:
        start = jnp.minimum(i * width, columns - width)
        part = {
            name: jax.lax.dynamic_slice_in_dim(a, start, width, axis=1)
            for name, a in arrays.items()
        }
        return jax.lax.dynamic_update_slice_in_dim(out, at_once(x, part, kind=kind), start, axis=1)

    out = jnp.zeros((x.shape[0], columns), jnp.float32)
    return jax.lax.fori_loop(0, -(-columns // width), tile, out)


def unpack(arrays: Arrays, kind: str) -> Float[Array, "D N"]:
    """Float32 weights; those of int8 before their scale."""
    if kind == "int8":
        return arrays["codes"].astype(jnp.float32)
    planes = jnp.stack(list(_planes(arrays, kind)), axis=1)  # [Q, classes, RUN, N]
    return planes.reshape(-1, planes.shape[3])


def _planes(arrays: Arrays, kind: str) -> Iterator[Float[Array, "Q R N"]]:
    """Float32 weights of every first, second, ... of the runs that share bytes.

    Weights that are not put in order need no copy: the product takes its inputs in theirs.
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
        w = code.astype(jnp.float32) - jnp.float32(k.zero)
        w *= _of_run(arrays, "scale", "sub", len(w), run, n)
        if "low" in arrays:
            w -= _of_run(arrays, "low", "sub_low", len(w), run, n)
        yield w


def _of_run(
    arrays: Arrays, scale: str, sub: str, count: int, run: int, classes: int
) -> Float[Array, "Q R N"]:
    """What each weight of one plane is multiplied with."""

    def spread(name: str) -> Float[Array, "Q R N"]:
        groups = arrays[name].astype(jnp.float32)
        columns = groups.shape[1]
        if len(groups) >= count * classes:  # one or more for each run
            mine = groups.reshape(count, classes, -1, 1, columns)[:, run]
            each = (count, mine.shape[1], RUN // mine.shape[1], columns)
            return jnp.broadcast_to(mine, each).reshape(count, RUN, columns)
        each = (len(groups), count // len(groups), RUN, columns)
        return jnp.broadcast_to(groups[:, None, None], each).reshape(count, RUN, columns)

    return spread(scale) * spread(sub) if sub in arrays else spread(scale)


def _weight_first(x: Float[Array, "... D"], w: Transposed) -> Float[Array, "..."]:
    """A product that reads the weight as it lies, where x · w would put it in order every time."""
    rows, columns = x.reshape(-1, x.shape[-1]), w.array.reshape(-1, x.shape[-1])
    out = _dot(columns, rows, ((1,), (1,)))
    out = jax.lax.optimization_barrier(out)  # or XLA makes x · w of the transposed product
    return out.T.reshape(*x.shape[:-1], *w.shape[1:])


def _by_panels(x: Float[Array, "... D"], w: Panels) -> Float[Array, "..."]:
    """A product with each panel side by side; for one token and for many x · w is as good."""
    rows, count = x.reshape(-1, x.shape[-1]), math.prod(w.shape[1:])
    if not 1 < len(rows) <= FEW:
        return _plain(x, w.whole)
    each = jnp.broadcast_to(rows, (len(w.panels), *rows.shape))
    out = _dot(each, w.panels, ((2,), (1,)), ((0,), (0,)))  # [P, M, PANEL]
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


def with_kernel(params: Any, kernel: bool) -> Any:
    """A parameter tree whose packed weights are multiplied by the kernel, or are not."""

    def choose(leaf: Any) -> Any:
        return dataclasses.replace(leaf, kernel=kernel) if isinstance(leaf, Packed) else leaf

    return jax.tree.map(choose, params, is_leaf=lambda leaf: isinstance(leaf, Packed))


def put_in_order(params: dict[str, Any], order: str) -> None:
    """Has a parameter tree keep its float matrices [D, ...] as a plan's `order` says.

    Done in place, one waited for after the other: beside the tree it takes no more memory than the
    largest. NumPy moves small matrices, as compiling an operation for their shape takes longer.
    """
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            put_in_order(leaf, order)
        elif is_matrix(name) and not isinstance(leaf, Packed | Joined):
            wanted = order_of(order, leaf.shape)
            if wanted is None and not isinstance(leaf, ORDERED):
                continue
            if wanted is None or not isinstance(leaf, wanted):
                small = isinstance(leaf, np.ndarray) and leaf.nbytes <= SMALL
                rows = leaf if small else _in_rows(leaf)
                params[name] = jax.block_until_ready(_ordered(rows, wanted))


def in_order(w: Any, order: str) -> Any:
    """The shapes of a float matrix [D, ...] kept as a plan's `order` says."""
    wanted = order_of(order, w.shape)
    return jax.eval_shape(functools.partial(_ordered, wanted=wanted), w) if wanted else w


def _ordered(w: Array | np.ndarray, wanted: type[ORDERED] | None) -> Any:
    module: Any = np if isinstance(w, np.ndarray) else jnp
    if wanted is Transposed:
        return Transposed(module.moveaxis(w, 0, -1))
    if wanted is Panels:
        flat = w.reshape(len(w), -1)
        flat = module.pad(flat, ((0, 0), (0, -flat.shape[1] % PANEL)))
        return Panels(w, flat.reshape(len(w), -1, PANEL).swapaxes(0, 1))
    return w


def _in_rows(w: Any) -> Float[Array, "D ..."]:
    if isinstance(w, Transposed):
        return jnp.moveaxis(w.array, -1, 0)
    return w.whole if isinstance(w, Panels) else jnp.asarray(w)
