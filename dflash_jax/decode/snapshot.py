"""One row's part of the state for one prompt chunk: taken out, and put back bit for bit.

A segment holds the keys and values of its chunk's positions, whichever slots they stand in, and
the recurrent states after them. A row into which all segments of a prefix were put, in order,
is as if it had been fed that prefix: same position, same visible bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Num

from dflash_jax.state import Cache, DecodeState, LayerCache, RecurrentCache

# The arrays of a cache, of one row and chunk: keys, values [K, C, H] and scales [K, C] of int8
# ones; state, inputs.
Held = tuple[Num[Array, "..."], ...]


@struct.dataclass
class Segment:
    """What the caches of one row know of one chunk of C tokens, by layer."""

    target: tuple[Held, ...]
    draft: tuple[Held, ...]


def take_segment(
    state: DecodeState, row: Int[Array, ""], start: Int[Array, ""], *, chunk: int
) -> Segment:
    """The segment of positions start .. start+chunk-1, right after they were fed."""

    def cut(x: Num[Array, "B K S ..."]) -> Num[Array, "K C ..."]:
        size = (1, x.shape[1], chunk, *x.shape[3:])
        return jax.lax.dynamic_slice(x, _corner(x, row, start), size)[0]

    def take(cache: Cache) -> Held:
        if isinstance(cache, RecurrentCache):
            return cache.state[row], cache.inputs[row]
        if cache.ring:
            at = _ring_slots(cache, start, chunk)
            return tuple(x[row, :, at].swapaxes(0, 1) for x in jax.tree.leaves(cache))
        return tuple(map(cut, jax.tree.leaves(cache)))

    return Segment(tuple(map(take, state.target)), tuple(map(take, state.draft)))


def put_segment(
    state: DecodeState,
    row: Int[Array, ""],
    start: Int[Array, ""],
    segment: Segment,
    *,
    chunk: int,
) -> DecodeState:
    """The state with a segment in a row, which then stands right behind it."""

    def put(cache: Any, held: Held) -> Any:
        if isinstance(cache, RecurrentCache):
            inputs = cache.inputs.at[row].set(held[1])
            return RecurrentCache(cache.state.at[row].set(held[0]), inputs)
        arrays, tree = jax.tree.flatten(cache)
        pairs = zip(arrays, held, strict=True)
        if cache.ring:
            at = _ring_slots(cache, start, chunk)
            return tree.unflatten(
                x.at[row, :, at].set(new.swapaxes(0, 1), unique_indices=True) for x, new in pairs
            )
        return tree.unflatten(
            jax.lax.dynamic_update_slice(x, new[None], _corner(x, row, start)) for x, new in pairs
        )

    return dataclasses.replace(
        state,
        target=tuple(map(put, state.target, segment.target)),
        draft=tuple(map(put, state.draft, segment.draft)),
        position=state.position.at[row].set(start + chunk),
    )


def _corner(x: Num[Array, "B K S ..."], row: Int[Array, ""], start: Int[Array, ""]) -> Any:
    return (row, 0, start, *(0,) * (x.ndim - 3))


def _ring_slots(cache: LayerCache, start: Int[Array, ""], chunk: int) -> Int[Array, " C"]:
    return (start + jnp.arange(chunk)) % cache.slots
