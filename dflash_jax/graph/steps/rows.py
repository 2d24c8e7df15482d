"""Programs that change rows without running a model.

A segment is one row's state for one prompt chunk: the keys and values of its positions, whatever
slots hold them, and the recurrent states after them. A row into which all segments of a prefix were
put, in order, equals one that was fed that prefix: same position, same visible bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Num

from dflash_jax.graph.protocols import Drafter
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.inputs import CopyRowInputs, ReplaceAnchorInputs, SegmentInputs
from dflash_jax.kernels.caches import Cache, LayerCache, RecurrentCache, put_row, take_row

# Arrays of one layer: keys, values [K, C, H] and scales [K, C] of int8 ones; or state, inputs.
LayerSegment = tuple[Num[Array, "..."], ...]


@struct.dataclass
class Segment:
    """State of one row for one chunk of C tokens, by layer."""

    target: tuple[LayerSegment, ...]
    drafter: Any  # the same of a drafter with caches, or what its `take` returned


def replace_anchor(state: DecodeState, inputs: ReplaceAnchorInputs) -> DecodeState:
    """Replace the pending tokens of some rows, which are in no cache yet."""
    anchor = jnp.where(inputs.rows, inputs.anchor, state.anchor)
    return dataclasses.replace(state, anchor=anchor)


def copy_row(state: DecodeState, inputs: CopyRowInputs) -> DecodeState:
    """Copy one row to another that would be fed the same tokens."""
    return put_row(state, take_row(state, inputs.source), inputs.destination)


def take_segment(
    state: DecodeState, inputs: SegmentInputs, *, chunk: int, drafter: Drafter | None = None
) -> Segment:
    """Return the segment of positions start .. start+chunk-1, right after they were fed."""
    row, start = inputs.row, inputs.start

    def cut(x: Num[Array, "B K S ..."]) -> Num[Array, "K C ..."]:
        size = (1, x.shape[1], chunk, *x.shape[3:])
        return jax.lax.dynamic_slice(x, _corner(x, row, start), size)[0]

    def take(cache: Cache) -> LayerSegment:
        if isinstance(cache, RecurrentCache):
            return cache.state[row], cache.inputs[row]
        if cache.ring:
            at = _ring_slots(cache, start, chunk)
            return tuple(x[row, :, at].swapaxes(0, 1) for x in jax.tree.leaves(cache))
        return tuple(map(cut, jax.tree.leaves(cache)))

    target = tuple(map(take, state.target))
    if has_caches(state.drafter):
        return Segment(target, tuple(map(take, state.drafter)))
    method = getattr(drafter, "take", None)
    return Segment(target, () if method is None else method(state.drafter, row, start, chunk))


def put_segment(
    state: DecodeState, inputs: SegmentInputs, *, chunk: int, drafter: Drafter | None = None
) -> DecodeState:
    """Put a segment into a row and move the row's position to the end of the segment."""
    row, start, segment = inputs.row, inputs.start, inputs.segment

    def put(cache: Any, held: LayerSegment) -> Any:
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

    drafts, method = state.drafter, getattr(drafter, "put", None)
    if has_caches(drafts):
        drafts = tuple(map(put, drafts, segment.drafter))
    elif method is not None:
        drafts = method(drafts, row, start, segment.drafter)
    return dataclasses.replace(
        state,
        target=tuple(map(put, state.target, segment.target)),
        drafter=drafts,
        position=state.position.at[row].set(start + chunk),
    )


def has_caches(state: Any) -> bool:
    """Return whether a state consists of caches whose segments are known here."""
    kinds = LayerCache | RecurrentCache
    return isinstance(state, tuple) and all(isinstance(cache, kinds) for cache in state)


def _corner(x: Num[Array, "B K S ..."], row: Int[Array, ""], start: Int[Array, ""]) -> Any:
    return (row, 0, start, *(0,) * (x.ndim - 3))


def _ring_slots(cache: LayerCache, start: Int[Array, ""], chunk: int) -> Int[Array, " C"]:
    return (start + jnp.arange(chunk)) % cache.slots
