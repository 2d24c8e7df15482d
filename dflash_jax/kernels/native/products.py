"""Products with weights in strips by the native kernels, and columns of these weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from dflash_jax.kernels.native.interleaved import HIGH, ORDER, WIDTH
from dflash_jax.quant.formats import E2M1, KINDS, RUN
from dflash_jax.quant.layouts import FLOAT, Interleaved

# Activations by their number in `gates.h`.
ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2}


def multiply(
    x: Float[Array, "... D"],
    w: Interleaved,
    *,
    live: Bool[Array, "..."] | None = None,
    activation: str = "",
    onto: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Return x · w in float32; each row of x has the same result in any company.

    With int8 weights each row of x is quantised to int8 first, except for its largest numbers
    where they stand out, unless they have `by_floats`. With other packed weights each
    32 numbers of a row are quantised. Float weights, of any width, are multiplied in float32.

    Args:
      live: rows of x that count, whose results alone are computed; the others are undefined. By
        default all are, and rows of zeros are not multiplied.
      onto: what the product is added to, in its memory if that is free; results of rows that do not
        count are its own.
      activation: of gates, with a weight [D, 2, F] of gate and up, F a multiple of 16: the result
        [..., F] is activation(gate(x)) · up(x). One of `ACTIVATIONS`.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    name = "int8_by_floats" if w.by_floats else _name(w)
    columns = w.shape[2:] if activation else w.shape[1:]
    out = jax.ShapeDtypeStruct((len(rows), math.prod(columns)), jnp.float32)
    counts = jnp.ones((0,), bool) if live is None else live.ravel()
    below = jnp.zeros((0,), jnp.float32) if onto is None else onto.reshape(out.shape)
    aliases = {} if onto is None else {2: 0}
    # Callers differ in what they do with the result; their fusions must not reach into it.
    call = jax.ffi.ffi_call(f"dflash_{name}", out, input_output_aliases=aliases)
    number = np.int32(ACTIVATIONS[activation])
    product = call(rows, counts, below, *_arrays(w), activation=number)
    return product.reshape(*x.shape[:-1], *columns)


def multiply_by_experts(
    x: Float[Array, "R D"], expert: Int[Array, " R"], w: Interleaved
) -> Float[Array, "R ..."]:
    """Return the product of each row with the matrix of its expert, alike to that of `multiply`.

    Weights of experts without rows are not read. Products of rows of zeros are zeros.

    Args:
      w: a stack [E, D, ...].
    """
    out = jax.ShapeDtypeStruct((len(x), math.prod(w.shape[2:])), jnp.float32)
    rows = x.astype(jnp.float32)
    each = expert.astype(jnp.int32)
    product = jax.ffi.ffi_call(f"dflash_experts_{_name(w)}", out)(rows, each, *_arrays(w))
    return product.reshape(len(x), *w.shape[2:])


def _name(w: Interleaved) -> str:
    return "float" if w.kind == FLOAT else w.kind.lower()


def _arrays(w: Interleaved) -> list[Array]:
    return [w.arrays[name] for name in ("values", *ORDER) if name in w.arrays]


def gather(w: Interleaved, ids: Int[Array, " P"]) -> Float[Array, "P D"]:
    """Return columns of a weight [D, N], packed ones as float32."""
    ids = jnp.clip(ids, 0, w.shape[1] - 1)
    strip = ids // WIDTH
    place = ids % WIDTH

    def column(name: str) -> Array:
        return w.arrays[name].reshape(len(w.arrays[name]), -1, WIDTH)[strip, :, place]

    if w.kind == FLOAT:
        values = w.arrays["values"]
        if values.dtype.itemsize == 4:
            return column("values")
        # XLA would widen the table of 16-bit floats before the loop over the steps of a call; hence
        # the gathered integers, and the barrier with ids, which keeps their conversion inside.
        values, strip = jax.lax.optimization_barrier((values, strip))
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16)[strip, :, place]
        return jax.lax.bitcast_convert_type(bits, values.dtype)
    k = KINDS[w.kind]
    depth = w.shape[0]
    quads = w.arrays["codes"].reshape(len(w.arrays["codes"]), -1, WIDTH, 4)[strip, :, place]
    if k.bits == 8:
        codes = quads.reshape(len(ids), -1)[:, :depth]
        zero = 128
    else:
        codes = _codes_of_groups(quads, depth, k.bits)
        zero = k.zero
    numbers = E2M1 if k.floats else k.numbers
    codes = jnp.array(numbers)[codes] if numbers else codes
    values = codes.astype(jnp.float32) - zero

    def of_weights(name: str, sub: str) -> Float[Array, "P D"]:
        factor = column(name).astype(jnp.float32)
        if k.sub:
            factor = jnp.repeat(factor, k.group // k.sub, axis=1)
            factor *= column(sub).astype(jnp.float32)
        return jnp.repeat(factor, depth // factor.shape[1], axis=1)

    if k.zeros:
        values -= jnp.repeat(column("zero").astype(jnp.float32), RUN, axis=1)
    values *= of_weights("scale", "sub")
    return values - of_weights("low", "sub_low") if k.low else values


def _codes_of_groups(quads: UInt8[Array, "P Q 4"], depth: int, bits: int) -> UInt8[Array, "P D"]:
    """Return codes of 4, 5 or 6 bits from the bytes of groups."""
    groups = quads.reshape(len(quads), depth // RUN, -1, 4)
    low = groups[:, :, :4]
    codes = jnp.concatenate([low & 15, low >> 4], axis=2)  # [P, groups, 8, 4]
    if HIGH[bits]:
        mask = (1 << bits - 4) - 1
        high_by_quad = {
            quad: groups[:, :, 4 + at] >> bit & mask
            for bit, quads_there in HIGH[bits]
            for at, quad in enumerate(quads_there)
        }
        codes |= jnp.stack([high_by_quad[quad] for quad in range(8)], axis=2) << 4
    return codes.reshape(len(quads), depth)
