"""The product with a packed weight as a Pallas kernel for NVIDIA GPUs (Triton).

A program computes one tile of the result. It proceeds along D run by run, 32 weights at a time:
bytes are loaded once, unpacked and scaled in registers, and multiplied on the tensor cores with
float32 accumulation. Unpacked weights are never written to memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from dflash_jax.kernels.products import of_code
from dflash_jax.quant.formats import KINDS, RUN, PackedFormat
from dflash_jax.quant.layouts import Arrays

COLUMNS = 64  # columns of a tile
ROWS = 64  # most rows of a tile: a power of two, at least 16


def multiply(
    x: Float[Array, "M D"], arrays: Arrays, *, kind: str, interpret: bool = False
) -> Float[Array, "M N"]:
    """Return x · w in float32. N must be a multiple of `COLUMNS`.

    Args:
      arrays: the packed weight [D, N].
      kind: its format, a key of `KINDS`.
      interpret: run the kernel as ordinary JAX operations, for tests without a GPU.
    """
    k = KINDS[kind]
    (count, depth) = x.shape
    columns = arrays["codes"].shape[1]
    assert columns % COLUMNS == 0, columns
    assert depth % k.unit == 0, (kind, depth)
    rows = min(ROWS, max(16, 1 << (count - 1).bit_length()))
    padded = -(-count // rows) * rows
    x = jnp.pad(x, ((0, padded - count), (0, 0)))
    names = sorted(arrays)
    operands = [arrays[name] for name in names]
    out = pl.pallas_call(
        functools.partial(_tile, kind=k, names=tuple(names), depth=depth),
        grid=(padded // rows, columns // COLUMNS),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
            *(pl.BlockSpec((a.shape[0], COLUMNS), lambda i, j: (0, j)) for a in operands),
        ],
        out_specs=pl.BlockSpec((rows, COLUMNS), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((padded, columns), jnp.float32),
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=4, num_stages=3),
        name=f"packed_{kind}",
    )(x, *operands)
    return out[:count]


def _tile(x: Any, *refs: Any, kind: PackedFormat, names: tuple[str, ...], depth: int) -> None:
    """Compute one tile. `refs` are the packed arrays in the order of `names`, then the result."""
    arrays = dict(zip(names, refs, strict=False))
    out = refs[-1]
    runs = kind.unit // RUN  # per step

    def step(i: Array, total: Float[Array, "M C"]) -> Float[Array, "M C"]:
        for pair in range(runs // kind.spread):
            at = (i * (runs // kind.spread) + pair) * RUN
            loaded = arrays["codes"][pl.ds(at, RUN), :]
            for nibble in range(kind.spread):
                run = i * runs + pair * kind.spread + nibble
                codes = _codes(loaded, arrays, kind, nibble, i, pair * kind.spread + nibble)
                w = _scaled(codes, arrays, kind, i, run)
                left = x[:, pl.ds(run * RUN, RUN)]
                total += _dot(left, w.astype(left.dtype))
        return total

    zero = jnp.zeros(out.shape, jnp.float32)
    out[...] = jax.lax.fori_loop(0, depth // kind.unit, step, zero)


def _codes(
    loaded: Array, arrays: dict[str, Any], kind: PackedFormat, nibble: int, step: Array, run: int
) -> Float[Array, "R C"]:
    """Return the codes of one run minus the zero point; `run` counts within the step."""
    codes = loaded.astype(jnp.int32)
    if kind.spread == 2:
        codes = codes >> (4 * nibble) & 15
    if kind.high:
        at = (step * (kind.unit // RUN // 4) + run // 4) * RUN
        high = arrays["high"][pl.ds(at, RUN), :].astype(jnp.int32)
        codes = codes | (high >> (2 * (run % 4)) & 3) << 4
    codes = of_code(codes) if kind.floats else codes
    return (codes - kind.zero).astype(jnp.float32)


def _scaled(
    codes: Float[Array, "R C"], arrays: dict[str, Any], kind: PackedFormat, step: Array, run: Array
) -> Float[Array, "R C"]:
    """Return codes times their scales, minus their offsets."""

    def one(name: str, at: Array) -> Float[Array, "1 C"]:
        return arrays[name][pl.ds(at, 1), :].astype(jnp.float32)

    def of_run(name: str, scaled: Any = 1) -> Float[Array, "R C"]:
        """Return the scales that are nearest to the weights of the run, times a factor."""
        rows = kind.run_scales
        count = codes.shape[1]
        if rows == 1:
            return scaled * one(name, run)
        each = arrays[name][pl.ds(run * rows, rows), :].astype(jnp.float32)
        spread = jnp.broadcast_to((scaled * each)[:, None], (rows, RUN // rows, count))
        return spread.reshape(codes.shape)

    if kind.zeros:
        codes = codes - one("zero", run)
    if kind.sub:
        w = codes * of_run("sub", one("scale", step))
        return w - of_run("sub_low", one("low", step)) if kind.low else w
    w = codes * of_run("scale")
    return w - of_run("low") if kind.low else w


def _dot(x: Float[Array, "M R"], w: Float[Array, "R C"]) -> Float[Array, "M C"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)
