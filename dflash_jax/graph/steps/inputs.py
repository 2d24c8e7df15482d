"""Inputs of every program, besides parameters and state.

Programs are declared with abstract values in these classes and called with NumPy or JAX arrays, so
the order of arguments is defined here only.

Letters as in `state`, and C tokens of a prompt chunk, W words of 32 bits that hold a bit per token.
"""

from typing import Any

from flax import struct
from jaxtyping import Bool, Float, Int, UInt32

from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.state import RowRules


@struct.dataclass
class PrefillInputs:
    """A prompt chunk for each of B rows; B is 1 where `row` is given."""

    tokens: Int[Any, "B C"]
    num_tokens: Int[Any, " B"]  # prompt tokens in the chunk; 0 leaves a row unchanged
    fresh: Bool[Any, " B"]  # rows that start a new request, at position 0
    rules: RowRules  # rules of all rows
    row: Int[Any, ""] | None = None  # the row to feed, in single-row programs
    masks: UInt32[Any, "B 1 W"] | None = None  # allowed tokens, in the constrained variant


@struct.dataclass
class DecodeInputs:
    """Inputs of a plain or speculative step, and of the halves of one."""

    rules: RowRules
    num_steps: Int[Any, ""] | None = None  # in multi-step programs; -n: exactly n, for timing
    masks: UInt32[Any, "B T W"] | None = None  # allowed tokens, in the constrained variant
    draft: Draft | None = None  # in the verifying half


@struct.dataclass
class ForcedTokensInputs:
    """Tokens that the host appends to rows."""

    tokens: Int[Any, "B T"]  # the pending anchor, then all forced tokens but the last
    num_tokens: Int[Any, " B"]  # number of `tokens`; 0 leaves a row's caches unchanged
    forced: Bool[Any, " B"]  # rows that get a new anchor; the others stay as they are
    anchor: Int[Any, " B"]  # the last forced token, or what replaces the pending one


@struct.dataclass
class PromptLogprobsInputs:
    """A chunk of one row's prompt, about to be prefilled."""

    row: Int[Any, ""]
    tokens: Int[Any, "1 C"]
    following: Int[Any, "1 C"]  # the token after each of them
    fresh: Bool[Any, " 1"]  # whether the chunk starts the prompt


@struct.dataclass
class UpdateDrafterInputs:
    """Results of a target step, for a drafter on another device."""

    observed: Any  # a `pair.Observed`
    fresh: Bool[Any, " B"]  # rows that the step started at position 0
    forced: Bool[Any, " B"]  # rows that got a new anchor, whether or not they were fed
    position: Int[Any, " B"]  # after the step
    anchor: Int[Any, " B"]


@struct.dataclass
class CopyRowInputs:
    """Source and destination of a copy."""

    source: Int[Any, ""]
    destination: Int[Any, ""]


@struct.dataclass
class SegmentInputs:
    """Row and first position of a segment to take, or of the given one to put."""

    row: Int[Any, ""]
    start: Int[Any, ""]
    segment: Any = None  # a `rows.Segment`


@struct.dataclass
class SetLogitsStateInputs:
    """New logits state of one row."""

    row: Int[Any, ""]
    bias: Float[Any, " V"]
    prompt: Bool[Any, " V"]  # tokens of the prompt
    counts: Int[Any, " V"]  # occurrences in the output
    penalties: Float[Any, " 3"]  # repetition, frequency, presence
    reports: Bool[Any, ""]  # whether log-probabilities are reported
