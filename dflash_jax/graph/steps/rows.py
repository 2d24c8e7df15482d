"""Programs that change rows without running a model.

A segment is one row's state for one prompt chunk: the keys and values of its positions, whatever
slots hold them, and the recurrent states after them. A row into which all segments of a prefix were
put, in order, equals one that was fed that prefix: same position, same visible bits.
"""

import dataclasses
from typing import Any

from flax import struct

from dflash_jax.graph import protocols
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.inputs import CopyRowInputs, SegmentInputs
from dflash_jax.kernels.caches import LayerSegment, put_part, put_row, take_part, take_row


@struct.dataclass
class Segment:
    """State of one row for one chunk of C tokens, by layer."""

    target: tuple[LayerSegment, ...]
    drafter: Any  # the same of a drafter with caches, or what its `take` returned


def copy_row(state: DecodeState, inputs: CopyRowInputs) -> DecodeState:
    """Copy one row to another that would be fed the same tokens."""
    return put_row(state, take_row(state, inputs.source), inputs.destination)


def take_segment(
    state: DecodeState, inputs: SegmentInputs, *, chunk: int, drafter: Any = None
) -> Segment:
    """Return the segment of positions start .. start+chunk-1, right after they were fed."""
    where = inputs.row, inputs.start, chunk
    return Segment(take_part(state.target, *where), protocols.take(drafter, state.drafter, *where))


def put_segment(
    state: DecodeState, inputs: SegmentInputs, *, chunk: int, drafter: Any = None
) -> DecodeState:
    """Put a segment into a row and move the row's position to the end of the segment."""
    row = inputs.row
    start = inputs.start
    segment = inputs.segment
    return dataclasses.replace(
        state,
        target=put_part(state.target, row, start, segment.target),
        drafter=protocols.put(drafter, state.drafter, row, start, segment.drafter),
        position=state.position.at[row].set(start + chunk),
    )
