"""What lives on the device between steps, and what the host reads after each.

Letters: B rows, T tokens in a call, S cache slots, K kv heads, G query heads per kv head,
H head dim, D width, F MLP width, V vocabulary, E stop tokens per row. Recurrent layers: N value
heads, P key width, Q value width, C convolved channels, W convolution inputs kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt32


@struct.dataclass
class LayerCache:
    """Keys and values of one attention layer, head-major.

    A plain cache holds position p in slot p. A ring holds it in slot p mod S; S must be at
    least the window plus the widest call, so that rejected rows never hide visible keys.
    Slots at or past the row's position are garbage: always masked, later overwritten.
    Keys and values in int8 have a scale for every slot and head. `kernel`: GPUs attend to it by
    the Pallas kernels.
    """

    k: Num[Array, "B K S H"]
    v: Num[Array, "B K S H"]
    k_scale: Float[Array, "B K S"] | None = None
    v_scale: Float[Array, "B K S"] | None = None
    ring: bool = struct.field(pytree_node=False, default=False)
    kernel: bool = struct.field(pytree_node=False, default=False)

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    def restart(self, rows: Bool[Array, " B"]) -> "LayerCache":
        """Itself: at position 0 every slot is garbage already."""
        return self

    def commit(self, n: Int[Array, " B"]) -> "LayerCache":
        """Itself: rows were written where they stay, and the position says which count."""
        return self


@struct.dataclass
class RecurrentCache:
    """What one recurrent layer knows of all tokens before the row's position.

    It has no slots to mask, so a forward pass leaves it alone and returns an update; only the
    update's `commit(n)` makes the next cache.
    """

    state: Float[Array, "B N P Q"]  # float32
    inputs: Float[Array, "B W C"]  # of the convolution, oldest first

    def restart(self, rows: Bool[Array, " B"]) -> "RecurrentCache":
        """The cache with some rows as they are before any token."""
        return clear_rows(self, rows)


Cache = LayerCache | RecurrentCache


class Update(Protocol):
    """What a forward pass over T tokens makes of a layer's cache, before n is known."""

    def commit(self, n: Int[Array, " B"]) -> Cache:
        """The cache after the first n tokens; rows with n = 0 keep theirs bit for bit."""
        ...


@struct.dataclass
class DecodeState:
    """Everything a step donates and returns. One position rules all caches of a row (C2)."""

    target: tuple[Cache, ...]
    draft: tuple[LayerCache, ...]  # context keys made from the target's taps; empty if no drafter
    position: Int[Array, " B"]  # committed tokens
    anchor: Int[Array, " B"]  # chosen, not yet in any cache


@struct.dataclass
class RowRules:
    """Where the device must cut a row by itself (R5), and how it chooses. Small, host-made."""

    stop_ids: Int[Array, "B E"]  # padded with -1
    limit: Int[Array, " B"]  # most tokens prompt and output may have together; 0 idles a row
    drafts: Int[Array, " B"]  # most drafts to verify; with 0 a row decodes plainly in any step
    temperature: Float[Array, " B"]  # 0 is greedy
    top_k: Int[Array, " B"]  # 0 is off
    top_p: Float[Array, " B"]  # 1 is off
    min_p: Float[Array, " B"]  # least share of the likeliest token's probability; 0 is off
    seed: UInt32[Array, " B"]
    # Tokens among which a row's `RowStep.floor` is chosen, padded with -1; a row that begins with
    # -1 has the whole vocabulary.
    choices: Int[Array, "B N"] | None = None
    # Token whose odds every step reports, see `StepOutput`; -1 in rows that need none. None leaves
    # the odds out of the program.
    opening: Int[Array, " B"] | None = None


# Most choices of a row: tokens that may continue the name of a declared tool. Of more, the first by
# id count.
CHOICES = 256


@struct.dataclass
class Logprobs:
    """Log-probabilities by the target's own logits, before anything a request adds to them."""

    chosen: Float[Array, "B T"]
    top_ids: Int[Array, "B T N"]  # likeliest first
    top: Float[Array, "B T N"]


COLUMNS = 4  # of a step's answer, behind its tokens


@struct.dataclass
class StepOutput:
    """One small integer array, so that the host pays for one copy per step.

    Columns: T tokens | count of valid ones | floor token | target finite | drafts verified,
    -1 where the drafter's numbers were not finite. Where R steps may be made by one call, their
    answers in order; -1 all over for those that were not made.

    With `reports_odds`, a column in front of the tokens holds the bits of a float32: the logit of
    `RowRules.opening` minus that of the last decided token, or, in a row with `RowRules.choices`,
    minus the largest logit.
    """

    packed: Int[Array, "*R B T+4"]
    logprobs: Logprobs | None = None  # of the T tokens; from the shaped lanes only
    reports_odds: bool = struct.field(pytree_node=False, default=False)

    @property
    def tokens(self) -> Int[Array, "*R B T"]:
        """Decided tokens; the first `count` of each row are valid."""
        return self.packed[..., int(self.reports_odds) : -COLUMNS]

    @property
    def count(self) -> Int[Array, "*R B"]:
        """How many tokens were decided for each row."""
        return self.packed[..., -COLUMNS]


def pack_output(
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    floor: Int[Array, " B"],
    finite: Bool[Array, " B"],
    drafts: Int[Array, " B"],
    logprobs: Logprobs | None = None,
    odds: Float[Array, " B"] | None = None,
) -> StepOutput:
    """The step's answer in one array; `read_output` takes it apart on the host."""
    columns = (count, floor, finite.astype(jnp.int32), drafts)
    parts = [tokens, jnp.stack(columns, axis=1)]
    if odds is not None:
        parts.insert(0, jax.lax.bitcast_convert_type(odds, jnp.int32)[:, None])
    return StepOutput(jnp.concatenate(parts, axis=1), logprobs, odds is not None)


def output_columns(rules: RowRules) -> int:
    """Columns of a step's answer besides its tokens, in programs that are given such rules."""
    return COLUMNS + (rules.opening is not None)


def all_finite(out: StepOutput) -> Bool[Array, ""]:
    """Whether a step's numbers are finite, in all rows, the drafter's included."""
    target, drafts = out.packed[..., -2], out.packed[..., -1]
    return (target > 0).all() & (drafts >= 0).all()


class RowStep(NamedTuple):
    """What one step said about one row."""

    tokens: tuple[int, ...]  # newly decided tokens, the next anchor last
    # Best token at the last decided place with stop tokens masked (R6), or best of the choices.
    floor: int
    finite: bool  # target logits
    draft_finite: bool
    drafts: int  # that were put to the target
    odds: float | None = None  # of `RowRules.opening`, where the program reports them


def read_output(out: StepOutput) -> list[list[RowStep]]:
    """Waits for what was dispatched and takes its answers apart: by step, then by row."""
    packed = np.asarray(out.packed)
    packed = packed.reshape(-1, *packed.shape[-2:])
    if not out.reports_odds:
        steps = packed.tolist()
        return [list(map(_row_step, rows)) for rows in steps if rows[0][-4] >= 0]
    odds = np.ascontiguousarray(packed[:, :, 0]).view(np.float32).tolist()
    steps = zip(packed[:, :, 1:].tolist(), odds, strict=True)
    return [list(map(_row_step, rows, found)) for rows, found in steps if rows[0][-4] >= 0]


def _row_step(said: list[int], odds: float | None = None) -> RowStep:
    *tokens, count, floor, finite, drafts = said
    return RowStep(tuple(tokens[:count]), floor, bool(finite), drafts >= 0, max(drafts, 0), odds)


def empty_cache(
    rows: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    *,
    dtype: DTypeLike,
    ring: bool = False,
    kernel: bool = False,
) -> LayerCache:
    """A zeroed cache. Zeros, not noise: masked probabilities times non-finite values is NaN."""
    shape = (rows, kv_heads, slots, head_dim)
    k, v = (jnp.zeros(shape, dtype) for _ in range(2))
    cache = LayerCache(k, v, ring=ring, kernel=kernel)
    if cache.k.dtype != jnp.int8:
        return cache
    k_scale, v_scale = (jnp.zeros(shape[:3], jnp.float32) for _ in range(2))
    return dataclasses.replace(cache, k_scale=k_scale, v_scale=v_scale)


def empty_recurrent(
    rows: int, state: tuple[int, int, int], inputs: tuple[int, int], *, dtype: DTypeLike
) -> RecurrentCache:
    """The cache before any token; the state [N, P, Q] is float32 whatever the dtype."""
    return RecurrentCache(
        state=jnp.zeros((rows, *state), jnp.float32), inputs=jnp.zeros((rows, *inputs), dtype)
    )


Arrays = TypeVar("Arrays")


def take_row(arrays: Arrays, row: Int[Array, ""]) -> Arrays:
    """One row of a tree of arrays [B, ...], as [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0), arrays)


def put_row(arrays: Arrays, one: Arrays, row: Int[Array, ""]) -> Arrays:
    """A tree of arrays [B, ...], in one row what another tree [1, ...] holds."""

    def put(whole: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, new, row, axis=0)

    return jax.tree.map(put, arrays, one)


def clear_rows(arrays: Arrays, rows: Bool[Array, " B"]) -> Arrays:
    """A tree of arrays [B, ...] with zeros in some rows."""

    def clear(x: Array) -> Array:
        chosen = rows.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(chosen, jnp.zeros((), x.dtype), x)

    return jax.tree.map(clear, arrays)


def commit(
    state: DecodeState,
    target: Sequence[Update],
    draft: tuple[LayerCache, ...],
    n: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> DecodeState:
    """Keeps the first n of the rows a forward pass wrote; the only way a position moves (C2).

    Args:
      target, draft: updates, or caches in which rows position .. position+T-1 were written.
      n: rows to keep, 0..T. With n = 0 the row stays as it was, anchor included.
      anchor: the next anchor of rows with n > 0.
    """
    return DecodeState(
        target=tuple(update.commit(n) for update in target),
        draft=draft,
        position=state.position + n,
        anchor=jnp.where(n > 0, anchor, state.anchor),
    )
