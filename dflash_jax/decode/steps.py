"""Every program the engine runs: forward, decide n, commit(n).

| program       | forward over                | n                                       |
| ------------- | --------------------------- | --------------------------------------- |
| `prefill`     | a prompt chunk              | its real tokens                         |
| `score`       | a prompt chunk (scoring.py) | 0: it only says how likely each was     |
| `forced`      | tokens the host dictates    | their number                            |
| `plain`       | anchor (and junk)           | 1                                       |
| `speculative` | anchor and drafted tokens   | the verified prefix, the anchor counted |

A forward pass writes all its rows into the caches; `commit` moves the row's one position past
the first n. What lies behind the position is garbage, masked, and overwritten by the next call.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decode.block import (
    Draft,
    Pair,
    Params,
    choose,
    draft_block,
    finite_places,
    floor,
    forward,
    logits_of,
    opening_odds,
    undrafted,
    verify_block,
)
from dflash_jax.decode.logits_processing import Shaping, no_logprobs
from dflash_jax.decode.verify import frozen
from dflash_jax.state import (
    DecodeState,
    RowRules,
    StepOutput,
    all_finite,
    clear_rows,
    commit,
    output_columns,
    pack_output,
    put_row,
    take_row,
)


def prefill(
    pair: Pair,
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B C"],
    count: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    rules: RowRules,
    *,
    sampled: bool,
    shaping: Shaping | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Feeds a prompt chunk; the first generated token means something after the last chunk.

    Args:
      count: real tokens of each row's chunk; 0 leaves a row untouched.
      fresh: rows that begin a new request, at position 0 whatever they held before.
    """
    state = dataclasses.replace(
        state,
        target=tuple(cache.restart(fresh) for cache in state.target),
        position=jnp.where(fresh, 0, state.position),
    )
    target, draft, hidden = forward(pair, params, state, tokens, chunked=True)
    last = jnp.maximum(count - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    raw = logits_of(pair, params, hidden)  # [B, 1, V]
    logits = shaping.applied(raw, tokens[:, :0]) if shaping else raw
    n, zero = jnp.minimum(count, 1), jnp.zeros_like(count)
    token = choose(logits, zero, state.position + count, rules, sampled=sampled)
    least = floor(logits, token, zero, state.position + count, rules, sampled=sampled)
    likely = shaping.logprobs(raw, token[:, None]) if shaping else None
    finite = (finite_places(raw) > 0) | (n == 0)
    odds = opening_odds(raw, token, zero, rules)
    out = pack_output(token[:, None], n, least, finite, zero, likely, odds)
    return commit(state, target, draft, count, token), out


def forced(
    pair: Pair,
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> tuple[DecodeState, Bool[Array, " B"]]:
    """Feeds tokens the host dictates, taps included, and sets the next anchor (R7).

    Args:
      tokens: the pending anchor and the dictated tokens but the last.
      anchor: the last dictated token, pending for the next step.

    Returns:
      The state, and whose hidden states are finite: asking for all of them keeps the target's
      pass whole, so that its last layer is that of other steps, not only what its caches need.
    """
    target, draft, hidden = forward(pair, params, state, tokens, chunked=not pair.exact)
    finite = jnp.isfinite(hidden).all(axis=(1, 2))
    return commit(state, target, draft, count, anchor), finite


def replace(state: DecodeState, rows: Bool[Array, " B"], anchor: Int[Array, " B"]) -> DecodeState:
    """Puts another token in the place of some rows' pending ones; no cache holds those (R6)."""
    return dataclasses.replace(state, anchor=jnp.where(rows, anchor, state.anchor))


def wipe(state: DecodeState, rows: Bool[Array, " B"]) -> DecodeState:
    """Zeroes rows whose caches may hold non-finite numbers; no mask stops recurrent states."""
    return clear_rows(state, rows)


def plain(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
    shaping: Shaping | None = None,
) -> tuple[DecodeState, StepOutput]:
    """One token per row by a block-wide forward whose other rows are junk (R1)."""
    junk = ((0, 0), (0, width - 1))
    block = jnp.pad(state.anchor[:, None], junk)
    draft, choice = undrafted(block, state), {"sampled": sampled, "shaping": shaping}
    _, state, out = verify_block(pair, params, state, draft, rules, **choice)
    return state, out


def speculative(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
    min_survival: float = 0.0,
    shaping: Shaping | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Drafts a block, verifies it, keeps what the target would have said itself.

    Args:
      min_survival: drafts whose chance to be kept the drafter puts lower are not verified.
    """
    drafted = draft_block(
        pair, params, state, rules, width=width, sampled=sampled, min_survival=min_survival
    )
    choice = {"sampled": sampled, "shaping": shaping}
    _, state, out = verify_block(pair, params, state, drafted, rules, **choice)
    return state, out


Drafted = tuple[
    Int[Array, "B T"], Float[Array, "B R V"] | None, Bool[Array, " B"], Int[Array, " B"]
]


def draft(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
    min_survival: float = 0.0,
) -> tuple[DecodeState, Drafted]:
    """The first half of a speculative step that another program verifies."""
    static: dict[str, Any] = {"width": width, "sampled": sampled, "min_survival": min_survival}
    found = draft_block(pair, params, state, rules, **static)
    assert found.count is not None
    state = dataclasses.replace(state, draft=found.caches)
    return state, (found.block, found.q, found.finite, found.count)


def verify(
    pair: Pair,
    params: Params,
    state: DecodeState,
    drafted: Drafted,
    rules: RowRules,
    *,
    sampled: bool,
    shaping: Shaping | None = None,
) -> tuple[DecodeState, StepOutput]:
    """The second half of a speculative step."""
    block, q, finite, count = drafted
    found = Draft(block=block, q=q, finite=finite, caches=state.draft, count=count)
    _, state, out = verify_block(
        pair, params, state, found, rules, sampled=sampled, shaping=shaping
    )
    return state, out


def follow(
    pair: Pair,
    params: Params,
    state: DecodeState,
    taps: tuple[Float[Array, "B T D"], ...],
    fresh: Bool[Array, " B"],
    position: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> DecodeState:
    """The drafter's half of a state, once the target has fed T tokens on another device.

    Args:
      fresh: rows that the target began anew, at position 0.
      position, anchor: where the target stands now.
    """
    start = jnp.where(fresh, 0, state.position)
    draft = pair.drafter_call(params, taps, state.draft, start, method="context")
    state = dataclasses.replace(state, position=start)
    return commit(state, (), draft, position - start, anchor)


def masked(
    step: Callable[..., tuple[DecodeState, StepOutput]],
    pair: Pair,
    params: Params,
    state: DecodeState,
    shaping: Shaping,
    masks: UInt32[Array, "B T W"],
    *rest: Any,
    **static: Any,
) -> tuple[DecodeState, Shaping, StepOutput]:
    """As `shaped`, and every place says only what its mask allows."""
    masking = dataclasses.replace(shaping, masks=masks)
    state, out = step(pair, params, state, *rest, shaping=masking, **static)
    return state, shaping.after(out), out


def shaped(
    step: Callable[..., tuple[DecodeState, StepOutput]],
    pair: Pair,
    params: Params,
    state: DecodeState,
    shaping: Shaping,
    *rest: Any,
    **static: Any,
) -> tuple[DecodeState, Shaping, StepOutput]:
    """One of the steps above over shaped logits, the shaping brought up to date."""
    state, out = step(pair, params, state, *rest, shaping=shaping, **static)
    return state, shaping.after(out), out


def copy_row(state: DecodeState, of: Int[Array, ""], to: Int[Array, ""]) -> DecodeState:
    """Has a row know what another does: both were to be fed the same."""
    return put_row(state, take_row(state, of), to)


def in_row(
    step: Callable[..., tuple[Any, ...]],
    params: Params,
    state: DecodeState,
    *rest: Any,
    carried: int,
) -> tuple[Any, ...]:
    """A `prefill` of one row, taken out and put back: the others cost nothing, stay as they are.

    Args:
      step: a prefill in its lane, of all rows, which here are one.
      rest: what the lane carries, of which `shaping` comes first; the row; the step's own
        arguments, of one row but for the rules.
      carried: how many a lane carries.
    """
    changed, masks = (state, *rest[: min(carried, 1)]), rest[1:carried]
    row, *own, rules = rest[carried:]
    mine = take_row(rules, row)

    def made(part: Any) -> tuple[Any, StepOutput]:
        *after, out = step(params, *part, *masks, *own, mine)
        return tuple(after), out

    # Once round a loop: otherwise XLA would read the row out of all rows where it is used, and
    # copy all of them to write it back.
    part = take_row(changed, row)
    likely = no_logprobs(1, 1, rest[0].bias.shape[-1]) if carried else None
    packed = jnp.zeros((1, 1 + output_columns(rules)), jnp.int32)
    none = StepOutput(packed, likely, rules.opening is not None)
    first = row >= 0
    _, part, out = jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (~carry[0], *made(carry[1])), (first, part, none)
    )
    return *put_row(changed, part, row), out


def several(
    step: Callable[..., tuple[DecodeState, StepOutput]],
    pair: Pair,
    params: Params,
    state: DecodeState,
    rounds: Int[Array, ""],
    rules: RowRules,
    *,
    most: int,
    width: int,
    **static: Any,
) -> tuple[DecodeState, StepOutput]:
    """Decode steps one after another without the host.

    They end when every row is frozen, or once a row's numbers are not finite.

    Args:
      rounds: steps to make, up to `most`; 0 makes one that no row may need, to be timed.
      width: tokens that one step feeds to a row.

    Returns:
      The state, and the answers [most, B, T+4]; those of steps that were not made are -1.
    """
    made = functools.partial(step, pair, params, rules=rules, width=width, **static)
    Carry = tuple[Int[Array, ""], Bool[Array, ""], DecodeState, Int[Array, "R B A"]]

    def goes_on(carry: Carry) -> Bool[Array, ""]:
        done, finite, state, _ = carry
        live = finite & (done < rounds) & ~frozen(state.anchor, state.position, rules).all()
        return live | (done + rounds == 0)

    def go_on(carry: Carry) -> Carry:
        done, _, state, answers = carry
        state, out = made(state)
        answers = jax.lax.dynamic_update_slice(answers, out.packed[None], (done, 0, 0))
        return done + 1, all_finite(out), state, answers

    columns = width + output_columns(rules)
    none = jnp.full((most, len(state.anchor), columns), -1, jnp.int32)
    start = jnp.int32(0), jnp.bool_(True), state, none
    _, _, state, answers = jax.lax.while_loop(goes_on, go_on, start)
    return state, StepOutput(answers, reports_odds=rules.opening is not None)
