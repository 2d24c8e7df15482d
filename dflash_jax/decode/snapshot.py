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
from jaxtyping import Array, Float, Int

from dflash_jax.state import Cache, DecodeState, LayerCache, RecurrentCache

Held = tuple[Float[Array, "..."], Float[Array, "..."]]  # keys, values [K, C, H]; state, inputs


@struct.dataclass
class Segment:
    """What the caches of one row know of one chunk of C tokens, by layer."""

    target: tuple[Held, ...]
    draft: tuple[Held, ...]


def take_segment(
    state: DecodeState, row: Int[Array, ""], start: Int[Array, ""], *, chunk: int
) -> Segment:
    """The segment of positions start .. start+chunk-1, right after they were fed."""

    def take(cache: Cache) -> Held:
        if isinstance(cache, RecurrentCache):
            return cache.state[row], cache.inputs[row]
        if cache.ring:
            at = _ring_slots(cache, start, chunk)
            return cache.k[row, :, at].swapaxes(0, 1), cache.v[row, :, at].swapaxes(0, 1)
        _, heads, _, dim = cache.k.shape
        corner, shape = (row, 0, start, 0), (1, heads, chunk, dim)
        k, v = (jax.lax.dynamic_slice(x, corner, shape)[0] for x in (cache.k, cache.v))
        return k, v

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
        if cache.ring:
            at = _ring_slots(cache, start, chunk)
            k, v = (
                x.at[row, :, at].set(new.swapaxes(0, 1), unique_indices=True)
                for x, new in ((cache.k, held[0]), (cache.v, held[1]))
            )
        else:
            k, v = (
                jax.lax.dynamic_update_slice(x, new[None], (row, 0, start, 0))
                for x, new in ((cache.k, held[0]), (cache.v, held[1]))
            )
        return dataclasses.replace(cache, k=k, v=v)

    return dataclasses.replace(
        state,
        target=tuple(map(put, state.target, segment.target)),
        draft=tuple(map(put, state.draft, segment.draft)),
        position=state.position.at[row].set(start + chunk),
    )


def _ring_slots(cache: LayerCache, start: Int[Array, ""], chunk: int) -> Int[Array, " C"]:
    return (start + jnp.arange(chunk)) % cache.slots
