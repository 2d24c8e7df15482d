"""Device state between steps, and the step output that the host reads.

Letters: B rows, T tokens in a call, S cache slots, K kv heads, G query heads per kv head,
H head dim, D width, F MLP width, V vocabulary, E stop tokens per row. Recurrent layers: N value
heads, P key width, Q value width, C convolved channels, W convolution inputs kept.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

Logits = Float[Array, "B T V"]
RowInts = Int[Array, " B"]  # an integer for each row


@struct.dataclass
class LayerCache:
    """Keys and values of one attention layer, head-major.

    A plain cache holds position p in slot p. A ring holds it in slot p mod S; S must be at
    least the window plus the widest call, so that rejected rows never hide visible keys.
    Slots at or past the row's position are garbage: always masked, later overwritten.
    Keys and values in int8 have a scale for every slot and head.
    """

    k: Num[Array, "B K S H"]
    v: Num[Array, "B K S H"]
    k_scale: Float[Array, "B K S"] | None = None
    v_scale: Float[Array, "B K S"] | None = None
    ring: bool = struct.field(pytree_node=False, default=False)

    @property
    def slots(self) -> int:
        """Number of slots S."""
        return self.k.shape[2]

    def restart(self, rows: Bool[Array, " B"]) -> "LayerCache":
        """Return the cache itself: at position 0 every slot is garbage already."""
        return self

    def commit(self, num_committed: Int[Array, " B"]) -> "LayerCache":
        """Return the cache itself: tokens are already in place, and the position masks the rest."""
        return self


@struct.dataclass
class RecurrentCache:
    """State of one recurrent layer after all tokens before the row's position.

    It has no slots to mask, so a forward pass leaves it unchanged and returns an update; only the
    update's `commit` makes the next cache.
    """

    state: Float[Array, "B N P Q"]  # float32
    inputs: Float[Array, "B W C"]  # of the convolution, oldest first

    def restart(self, rows: Bool[Array, " B"]) -> "RecurrentCache":
        """Return the cache with some rows as before any token."""
        return zero_rows(self, rows)


Cache = LayerCache | RecurrentCache


class Update(Protocol):
    """Result of a layer's forward pass over T tokens, before it is known how many are kept."""

    def commit(self, num_committed: Int[Array, " B"], /) -> Cache:
        """Return the cache after the first tokens; rows with 0 keep theirs bit for bit."""
        ...


@struct.dataclass
class DecodeState:
    """Everything a step donates and returns. One position rules all caches of a row."""

    target: tuple[Cache, ...]
    drafter: tuple[LayerCache, ...]  # context keys made from the target's taps; empty if no drafter
    position: Int[Array, " B"]  # committed tokens
    anchor: Int[Array, " B"]  # decided, not yet in any cache


@struct.dataclass
class RowRules:
    """Stop and sampling rules of each row. Small arrays made by the host.

    They let the device end a row on its own, so that the host may dispatch steps ahead.
    """

    stop_ids: Int[Array, "B E"]  # padded with -1
    limit: Int[Array, " B"]  # maximum length of prompt and output together; 0 freezes a row
    max_drafts: Int[Array, " B"]  # drafts to verify; a row with 0 decodes plainly in any step
    temperature: Float[Array, " B"]  # 0 is greedy
    top_k: Int[Array, " B"]  # 0 is off
    top_p: Float[Array, " B"]  # 1 is off
    min_p: Float[Array, " B"]  # minimum probability relative to the most probable token; 0 is off
    seed: UInt32[Array, "B 2"]  # high word, low word
    # Tokens among which `RowStep.next_best` is chosen, padded with -1; a row that begins with -1
    # has the whole vocabulary.
    choices: Int[Array, "B N"] | None = None
    # First token of a tool call, whose odds every step reports (see `StepOutput`); -1 in rows that
    # need none. None leaves the odds out of the program.
    opening: Int[Array, " B"] | None = None


# Maximum number of choices of a row: tokens that may continue the name of a declared tool. Of more,
# the first by id count.
CHOICES = 256


@struct.dataclass
class Logprobs:
    """Log-probabilities under the target's own logits, before any logits processing."""

    chosen: Float[Array, "B T"]
    top_ids: Int[Array, "B T N"]  # most probable first
    top: Float[Array, "B T N"]


class OutputColumn(enum.IntEnum):
    """Columns of a packed output after its tokens, counted from the end."""

    NUM_TOKENS = -4  # decided tokens; the first ones of a row are valid
    NEXT_BEST = -3  # see `RowStep`
    FINITE = -2  # whether the target's logits are finite
    NUM_DRAFTS = -1  # drafts verified; -1 if the drafter's numbers are not finite


@struct.dataclass
class StepOutput:
    """Output of one step, or of R steps made by one call, packed for a single copy to the host.

    Columns are T tokens, `draft_columns` drafts that were verified (-1 where there was none), and
    those of `OutputColumn`. All columns of a step that was not made are -1.

    With `reports_odds`, a first column holds the bits of a float32: the logit of
    `RowRules.opening` minus that of the last decided token, or, in a row with `RowRules.choices`,
    minus the largest logit.
    """

    packed: Int[Array, "*R B columns"]
    logprobs: Logprobs | None = None  # of the T tokens, if there is a logits state
    reports_odds: bool = struct.field(pytree_node=False, default=False)
    # T - 1 in steps that draft, if the plan reports drafts (`Plan.report_drafts`).
    draft_columns: int = struct.field(pytree_node=False, default=0)

    @property
    def tokens(self) -> Int[Array, "*R B T"]:
        """Decided tokens; the first `num_tokens` of each row are valid."""
        end = OutputColumn.NUM_TOKENS - self.draft_columns
        return self.packed[..., int(self.reports_odds) : end]

    @property
    def num_tokens(self) -> Int[Array, "*R B"]:
        """Number of tokens decided for each row."""
        return self.packed[..., OutputColumn.NUM_TOKENS]

    @property
    def all_finite(self) -> Bool[Array, ""]:
        """Whether all numbers of target and drafter are finite, in all rows."""
        target, drafts = (
            self.packed[..., column] for column in (OutputColumn.FINITE, OutputColumn.NUM_DRAFTS)
        )
        return (target > 0).all() & (drafts >= 0).all()


def pack_output(
    tokens: Int[Array, "B T"],
    num_tokens: Int[Array, " B"],
    next_best: Int[Array, " B"],
    finite: Bool[Array, " B"],
    num_drafts: Int[Array, " B"],
    *,
    drafts: Int[Array, "B T-1"] | None = None,
    logprobs: Logprobs | None = None,
    call_odds: Float[Array, " B"] | None = None,
) -> StepOutput:
    """Return the output of a step; `read_output` unpacks it on the host.

    Args:
      drafts: drafts to report, of which the first `num_drafts` were verified.
    """
    columns = {
        OutputColumn.NUM_TOKENS: num_tokens,
        OutputColumn.NEXT_BEST: next_best,
        OutputColumn.FINITE: finite.astype(jnp.int32),
        OutputColumn.NUM_DRAFTS: num_drafts,
    }
    parts = [tokens, jnp.stack([columns[column] for column in OutputColumn], axis=1)]
    if drafts is not None:
        verified = jnp.arange(drafts.shape[1])[None, :] < num_drafts[:, None]
        parts.insert(1, jnp.where(verified, drafts, -1))
    if call_odds is not None:
        parts.insert(0, jax.lax.bitcast_convert_type(call_odds, jnp.int32)[:, None])
    draft_columns = 0 if drafts is None else drafts.shape[1]
    packed = jnp.concatenate(parts, axis=1)
    return StepOutput(packed, logprobs, call_odds is not None, draft_columns)


def output_columns(rules: RowRules) -> int:
    """Return the number of columns besides tokens and drafts, in programs with such rules."""
    return len(OutputColumn) + (rules.opening is not None)


class RowStep(NamedTuple):
    """Output of one step for one row, on the host."""

    tokens: tuple[int, ...]  # newly decided, the next anchor last
    # Best token at the last decided place except stop tokens, or the best of the choices.
    next_best: int
    finite: bool  # the target's logits
    draft_finite: bool
    num_drafts: int  # verified by the target
    call_odds: float | None = None  # of `RowRules.opening`, if the program reports them
    drafts: tuple[int, ...] = ()  # that were verified, if the program reports them


def read_output(out: StepOutput) -> list[list[RowStep]]:
    """Wait for a dispatched call and return its output, by step, then by row."""
    packed = np.asarray(out.packed)
    packed = packed.reshape(-1, *packed.shape[-2:])
    packed = packed[packed[:, 0, OutputColumn.NUM_TOKENS] >= 0]  # steps that were made
    read = functools.partial(_row_step, out.draft_columns)
    if not out.reports_odds:
        return [list(map(read, rows)) for rows in packed.tolist()]
    odds = np.ascontiguousarray(packed[:, :, 0]).view(np.float32).tolist()
    steps = zip(packed[:, :, 1:].tolist(), odds, strict=True)
    return [list(map(read, rows, row_odds)) for rows, row_odds in steps]


def _row_step(draft_columns: int, row: list[int], call_odds: float | None = None) -> RowStep:
    num_tokens, next_best, finite, num_drafts = row[OutputColumn.NUM_TOKENS :]
    tokens, draft_finite, num_drafts = tuple(row[:num_tokens]), num_drafts >= 0, max(num_drafts, 0)
    drafts = ()
    if draft_columns:
        first = len(row) - len(OutputColumn) - draft_columns
        drafts = tuple(row[first : first + num_drafts])
    return RowStep(tokens, next_best, bool(finite), draft_finite, num_drafts, call_odds, drafts)


def empty_cache(
    rows: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    *,
    dtype: DTypeLike,
    ring: bool = False,
) -> LayerCache:
    """Return a zeroed cache. Not noise: zero probability times a non-finite value is NaN."""
    shape = (rows, kv_heads, slots, head_dim)
    k, v = (jnp.zeros(shape, dtype) for _ in range(2))
    cache = LayerCache(k, v, ring=ring)
    if cache.k.dtype != jnp.int8:
        return cache
    k_scale, v_scale = (jnp.zeros(shape[:3], jnp.float32) for _ in range(2))
    return dataclasses.replace(cache, k_scale=k_scale, v_scale=v_scale)


def empty_recurrent(
    rows: int, state: tuple[int, int, int], inputs: tuple[int, int], *, dtype: DTypeLike
) -> RecurrentCache:
    """Return the cache before any token; the state [N, P, Q] is float32 whatever the dtype."""
    return RecurrentCache(
        state=jnp.zeros((rows, *state), jnp.float32), inputs=jnp.zeros((rows, *inputs), dtype)
    )


Arrays = TypeVar("Arrays")


def take_row(arrays: Arrays, row: Int[Array, ""]) -> Arrays:
    """Return one row of a tree of arrays [B, ...], as [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0), arrays)


def put_row(arrays: Arrays, one: Arrays, row: Int[Array, ""]) -> Arrays:
    """Return a tree of arrays [B, ...] with one row replaced by another tree [1, ...]."""

    def put(whole: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, new, row, axis=0)

    return jax.tree.map(put, arrays, one)


def zero_rows(arrays: Arrays, rows: Bool[Array, " B"]) -> Arrays:
    """Return a tree of arrays [B, ...] with zeros in some rows."""

    def clear(x: Array) -> Array:
        chosen = rows.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(chosen, jnp.zeros((), x.dtype), x)

    return jax.tree.map(clear, arrays)


def restart_rows(state: DecodeState, rows: Bool[Array, " B"]) -> DecodeState:
    """Return a state in which some rows start at position 0, whatever they held before."""
    return dataclasses.replace(
        state,
        target=tuple(cache.restart(rows) for cache in state.target),
        position=jnp.where(rows, 0, state.position),
    )


def commit(
    state: DecodeState,
    target: Sequence[Update],
    drafter: tuple[LayerCache, ...],
    num_committed: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> DecodeState:
    """Keep the first tokens that a forward pass wrote; nothing else advances a position in a step.

    Args:
      target, drafter: updates, or caches in which slots position .. position+T-1 were written.
      num_committed: tokens to keep, 0..T. With 0 the row stays as it was, anchor included.
      anchor: the next anchor of rows with num_committed > 0.
    """
    return DecodeState(
        target=tuple(update.commit(num_committed) for update in target),
        drafter=drafter,
        position=state.position + num_committed,
        anchor=jnp.where(num_committed > 0, anchor, state.anchor),
    )
