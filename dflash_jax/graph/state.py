"""Device state between steps, and the step output that the host reads.

Letters: B rows, T tokens in a call, D width, V vocabulary, E stop tokens per row.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.errors import PlanError
from dflash_jax.kernels.caches import Update
from dflash_jax.plan import ResolvedPlan

Logits = Float[Array, "B T V"]
RowInts = Int[Array, " B"]  # an integer for each row


@struct.dataclass
class DecodeState:
    """Everything a step donates and returns. One position rules all caches of a row."""

    target: tuple[Any, ...]  # caches, as `Target.empty_caches` makes them
    drafter: Any  # the drafter's state, as `Drafter.empty` makes it; () without a drafter
    position: Int[Array, " B"]  # committed tokens
    anchor: Int[Array, " B"]  # decided, not yet in any cache


@struct.dataclass
class RowRules:
    """Stop and sampling rules of each row. Small arrays made by the host.

    They let the device end a row on its own, so that the host may dispatch steps ahead.
    """

    stop_ids: Int[Array, "B E"]  # padded with -1
    # Maximum length of prompt and output together; 0 freezes a row, and one with COMMITS_NOTHING is
    # computed, but stays as it is: its steps can be timed.
    limit: Int[Array, " B"]
    max_drafts: Int[Array, " B"]  # drafts to verify; a row with 0 decodes plainly in any step
    temperature: Float[Array, " B"]  # 0 is greedy
    top_k: Int[Array, " B"]  # 0 is off
    top_p: Float[Array, " B"]  # 1 is off
    min_p: Float[Array, " B"]  # minimum probability relative to the most probable token; 0 is off
    seed: UInt32[Array, "B 2"]  # high word, low word
    # Tokens among which `RowStep.replacement_token` is chosen, padded with -1; a row that begins
    # with -1 has the whole vocabulary.
    choices: Int[Array, "B N"] | None = None
    # First token of a tool call, whose odds every step reports (see `StepOutput`); -1 in rows that
    # need none. None leaves the odds out of the program.
    opening: Int[Array, " B"] | None = None


COMMITS_NOTHING = -1  # a limit

# Maximum number of choices of a row: tokens that may continue the name of a declared tool. Of more,
# the first by id count.
CHOICES = 256


def idle_arrays(plan: ResolvedPlan) -> dict[str, np.ndarray]:
    """Return the fields of rules under which every row is frozen, on the host."""
    b = plan.rows
    arrays = {
        "stop_ids": np.full((b, plan.stop_slots), -1, np.int32),
        "limit": np.zeros(b, np.int32),
        "max_drafts": np.full(b, plan.block - 1, np.int32),
        "temperature": np.zeros(b, np.float32),
        "top_k": np.zeros(b, np.int32),
        "top_p": np.ones(b, np.float32),
        "min_p": np.zeros(b, np.float32),
        "seed": np.zeros((b, 2), np.uint32),
        "choices": np.full((b, CHOICES), -1, np.int32),
    }
    if plan.report_tool_call_margin:
        arrays["opening"] = np.full(b, -1, np.int32)
    return arrays


def idle_rules(plan: ResolvedPlan) -> RowRules:
    """Return rules under which every row is frozen."""
    return RowRules(**{name: jnp.asarray(array) for name, array in idle_arrays(plan).items()})


class PromptPart(NamedTuple):
    """The next tokens of one prompt.

    Attributes:
      row: row of the call's arrays, from 0.
      position: number of the prompt's tokens that were fed before.
      tokens: token ids, at most as many as the call is wide.
    """

    row: int
    position: int
    tokens: Sequence[int] | np.ndarray


def prompt_arrays(
    parts: Iterable[PromptPart], rows: int, width: int
) -> tuple[Int[np.ndarray, "B C"], Int[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
    """Return the padded tokens, their numbers and the starts of prompts of one prefill call.

    Args:
      parts: the next tokens of each prompt; rows without one are left unchanged.
      rows: number of rows that the call feeds, B.
      width: number of tokens that the call feeds to a row, C.
    """
    tokens = np.zeros((rows, width), np.int32)
    lengths = np.zeros(rows, np.int32)
    fresh = np.zeros(rows, bool)
    for part in parts:
        length = len(part.tokens)
        tokens[part.row, :length] = part.tokens
        lengths[part.row] = length
        fresh[part.row] = part.position == 0
    return tokens, lengths, fresh


@struct.dataclass
class Logprobs:
    """Log-probabilities under the target's own logits, before any logits processing."""

    chosen: Float[Array, "B T"]
    top_ids: Int[Array, "B T N"]  # most probable first
    top: Float[Array, "B T N"]


class OutputColumn(enum.IntEnum):
    """Columns of a packed output after its tokens, counted from the end."""

    NUM_TOKENS = -4  # decided tokens; the first ones of a row are valid
    REPLACEMENT_TOKEN = -3  # see `RowStep`
    FINITE = -2  # whether the target's logits are finite
    NUM_DRAFTS = -1  # drafts verified, + COPIED; -1 if the drafter's numbers are not finite


COPIED = 1 << 20  # added to the number of drafts that were copied from the text


class OutputSizes(NamedTuple):
    """What the output of a step has for a row."""

    tokens: int  # T
    drafts: int = 0  # T - 1 in steps that draft, if the plan reports drafts
    top: int = 0  # most probable tokens of each position, if the plan reports them

    def columns(self, rules: RowRules) -> int:
        """Return the number of columns, in programs with such rules."""
        return (self.tokens + self.drafts) * (1 + 2 * self.top) + output_columns(rules)


class TopTokens(NamedTuple):
    """The most probable tokens of some positions, before any logits processing."""

    ids: Any  # integers [..., positions, N], most probable first
    probs: Any  # float32 [..., positions, N]; on the device, their logarithms


@struct.dataclass
class StepOutput:
    """Output of one step, or of R steps made by one call, packed for a single copy to the host.

    Columns are T tokens, `draft_columns` drafts that were verified (-1 where there was none), with
    `top` the ids and the bits of log-probabilities of the drafter's and then of the target's most
    probable tokens, and those of `OutputColumn`. All columns of a step that was not made are -1.

    With `reports_tool_call_margin`, a first column holds the bits of a float32: the logit of
    `RowRules.opening` minus that of the last decided token, or, in a row with `RowRules.choices`,
    minus the largest logit.
    """

    packed: Int[Array, "*R B columns"]
    logprobs: Logprobs | None = None  # of the T tokens; None without a logits state
    reports_tool_call_margin: bool = struct.field(pytree_node=False, default=False)
    # T - 1 in steps that draft, if the plan reports drafts (`Plan.report_drafts`).
    draft_columns: int = struct.field(pytree_node=False, default=0)
    top: int = struct.field(pytree_node=False, default=0)  # number of tokens, `Plan.report_top`

    @property
    def num_positions(self) -> int:
        """T, the number of positions of the target."""
        columns = self.packed.shape[-1] - len(OutputColumn)
        if self.reports_tool_call_margin:
            columns -= 1
        return columns // (1 + 2 * self.top) - self.draft_columns

    @property
    def tokens(self) -> Int[Array, "*R B T"]:
        """Decided tokens; the first `num_tokens` of each row are valid."""
        first = int(self.reports_tool_call_margin)
        return self.packed[..., first : first + self.num_positions]

    @property
    def num_tokens(self) -> Int[Array, "*R B"]:
        """Number of tokens decided for each row."""
        return self.packed[..., OutputColumn.NUM_TOKENS]

    @property
    def all_finite(self) -> Bool[Array, ""]:
        """Whether all numbers of target and drafter are finite, in all rows."""
        finite = self.packed[..., OutputColumn.FINITE]
        drafts = self.packed[..., OutputColumn.NUM_DRAFTS]
        return (finite > 0).all() & (drafts >= 0).all()


def pack_output(
    tokens: Int[Array, "B T"],
    num_tokens: Int[Array, " B"],
    replacement_token: Int[Array, " B"],
    finite: Bool[Array, " B"],
    num_drafts: Int[Array, " B"],
    *,
    drafts: Int[Array, "B T-1"] | None = None,
    tops: Sequence[TopTokens] = (),
    tool_call_margin: Float[Array, " B"] | None = None,
) -> StepOutput:
    """Return the output of a step without log-probabilities; `read_output` unpacks it on the host.

    Args:
      num_drafts: as in its column.
      drafts: drafts to report, of which so many were verified.
      tops: most probable tokens of the drafter, if it drafts, and of the target.
    """
    columns = {
        OutputColumn.NUM_TOKENS: num_tokens,
        OutputColumn.REPLACEMENT_TOKEN: replacement_token,
        OutputColumn.FINITE: finite.astype(jnp.int32),
        OutputColumn.NUM_DRAFTS: num_drafts,
    }
    numbers = jnp.stack([columns[column] for column in OutputColumn], axis=1)
    parts = [tokens]
    if drafts is not None:
        count = jnp.maximum(num_drafts, 0) % COPIED
        verified = jnp.arange(drafts.shape[1])[None, :] < count[:, None]
        parts.append(jnp.where(verified, drafts, -1))
    for top in tops:
        bits = jax.lax.bitcast_convert_type(top.probs, jnp.int32)
        parts.append(top.ids.reshape(len(tokens), -1))
        parts.append(bits.reshape(len(tokens), -1))
    parts.append(numbers)
    if tool_call_margin is not None:
        parts.insert(0, jax.lax.bitcast_convert_type(tool_call_margin, jnp.int32)[:, None])
    draft_columns = 0 if drafts is None else drafts.shape[1]
    packed = jnp.concatenate(parts, axis=1)
    size = tops[-1].ids.shape[-1] if tops else 0
    return StepOutput(packed, None, tool_call_margin is not None, draft_columns, size)


def output_columns(rules: RowRules) -> int:
    """Return the number of columns besides tokens and drafts, in programs with such rules."""
    count = len(OutputColumn)
    return count if rules.opening is None else count + 1


class RowStep(NamedTuple):
    """Output of one step for one row, on the host."""

    tokens: tuple[int, ...]  # newly decided, the next anchor last
    # Best token at the last decided position except stop tokens, or the best of the choices.
    replacement_token: int
    finite: bool  # the target's logits
    draft_finite: bool
    num_drafts: int  # verified by the target
    tool_call_margin: float | None = None  # margin of `RowRules.opening`, if it is reported
    drafts: tuple[int, ...] = ()  # verified drafts, if they are reported
    copied: bool = False  # whether the drafts were copied from the text, and not the drafter's
    # Of each verified draft, and of each position that the target verified or decided.
    draft_top: TopTokens | None = None
    target_top: TopTokens | None = None


def read_output(out: StepOutput) -> list[list[RowStep]]:
    """Wait for a dispatched call and return its output, by step, then by row."""
    packed = np.asarray(out.packed)
    packed = packed.reshape(-1, *packed.shape[-2:])
    packed = packed[packed[:, 0, OutputColumn.NUM_TOKENS] >= 0]  # steps that were made
    return _with_tops(packed, out) if out.top else _rows(packed, out)


def _rows(packed: np.ndarray, out: StepOutput) -> list[list[RowStep]]:
    """Return the output by step and row, without the most probable tokens."""
    read = functools.partial(_row_step, out.draft_columns)
    if not out.reports_tool_call_margin:
        return [list(map(read, rows)) for rows in packed.tolist()]
    odds = np.ascontiguousarray(packed[:, :, 0]).view(np.float32).tolist()
    steps = zip(packed[:, :, 1:].tolist(), odds, strict=True)
    return [list(map(read, rows, row_odds)) for rows, row_odds in steps]


def _with_tops(packed: np.ndarray, out: StepOutput) -> list[list[RowStep]]:
    """Return the output by step and row, with the most probable tokens of each position."""
    first = out.draft_columns + out.num_positions
    if out.reports_tool_call_margin:
        first += 1
    end = packed.shape[-1] + OutputColumn.NUM_TOKENS
    row_steps = _rows(np.delete(packed, np.s_[first:end], axis=-1), out)
    drafts, at = _read_tops(packed, first, out.draft_columns, out.top)
    target, _ = _read_tops(packed, at, out.num_positions, out.top)

    def cut(top: TopTokens, step: int, row: int, count: int) -> TopTokens:
        return TopTokens(*(x[step, row, :count] for x in top))

    return [
        [
            x._replace(
                draft_top=cut(drafts, step, row, x.num_drafts) if out.draft_columns else None,
                target_top=cut(target, step, row, x.num_drafts + 1),
            )
            for row, x in enumerate(rows)
        ]
        for step, rows in enumerate(row_steps)
    ]


def _read_tops(packed: np.ndarray, first: int, count: int, top: int) -> tuple[TopTokens, int]:
    """Return the most probable tokens of `count` positions, and the column after them.

    Args:
      packed: output by step and row, [R, B, columns].
      first: their first column, of ids; bits of log-probabilities follow.
      top: number of tokens of a position.
    """
    shape = (*packed.shape[:2], count, top)
    middle = first + count * top
    end = middle + count * top
    ids = np.ascontiguousarray(packed[..., first:middle].reshape(shape))
    bits = np.ascontiguousarray(packed[..., middle:end].reshape(shape))
    return TopTokens(ids, np.exp(bits.view(np.float32))), end


def _row_step(draft_columns: int, row: list[int], tool_call_margin: float | None = None) -> RowStep:
    num_tokens, replacement_token, finite, num_drafts = row[OutputColumn.NUM_TOKENS :]
    tokens = tuple(row[:num_tokens])
    draft_finite = num_drafts >= 0
    copied, num_drafts = divmod(max(num_drafts, 0), COPIED)
    drafts = ()
    if draft_columns:
        first = len(row) - len(OutputColumn) - draft_columns
        drafts = tuple(row[first : first + num_drafts])
    return RowStep(
        tokens,
        replacement_token,
        bool(finite),
        draft_finite,
        num_drafts,
        tool_call_margin,
        drafts,
        bool(copied),
    )


def described(x: Any) -> str:
    """Return dtypes and shapes of arrays of a tree, or what anything else is, for errors."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{[*x.shape]}"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(described, x))})"
    return "None" if x is None else f"a {type(x).__name__}"


def expect_state(state: Any, before: Any, source: str, maker: str) -> None:
    """Check that a state has the structure, shapes and dtypes that it was made with.

    Args:
      source: the member that returned it.
      maker: the member that made the state before.

    Raises:
      PlanError: it has others.
    """
    if jax.tree.structure(state) != jax.tree.structure(before):
        raise PlanError(
            f"{source} returned {described(state)} as the state; expected {described(before)}, as"
            f" {maker} made it"
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree_util.tree_leaves_with_path(before),
        strict=True,
    )
    for (path, x), (_, wanted) in pairs:
        if described(x) != described(wanted):
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            raise PlanError(
                f"{source} returned {described(x)} as the state{f' at {place}' if place else ''};"
                f" expected {described(wanted)}, as {maker} made it: a step keeps shapes and"
                " dtypes, so cast what is written"
            )


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
    drafter: Any,
    num_committed: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> DecodeState:
    """Keep the first tokens that a forward pass wrote; nothing else advances a position in a step.

    Args:
      target: updates, or caches in which slots position .. position+T-1 were written.
      drafter: the drafter's state after the committed tokens.
      num_committed: tokens to keep, 0..T. With 0 the row stays as it was, anchor included.
      anchor: the next anchor of rows with num_committed > 0.
    """
    caches = []
    for update in target:
        caches.append(update.commit(num_committed))
        before = state.target[len(caches) - 1 : len(caches)]
        source = f"{type(update).__name__}.commit of layer {len(caches) - 1}"
        expect_state(tuple(caches[-1:]), before, source, "empty_caches")
    return DecodeState(
        target=tuple(caches),
        drafter=drafter,
        position=state.position + num_committed,
        anchor=jnp.where(num_committed > 0, anchor, state.anchor),
    )
