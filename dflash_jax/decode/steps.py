"""Every program the engine runs: forward, decide n, commit(n).

| program       | forward over                | n                                       |
| ------------- | --------------------------- | --------------------------------------- |
| `prefill`     | a prompt chunk              | its real tokens                         |
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

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.config import LATE
from dflash_jax.decode.sampling import (
    ACCEPT,
    TOKEN,
    Drafting,
    draw,
    likeliest,
    probabilities,
    row_keys,
)
from dflash_jax.decode.shaping import Shaping, logprobs
from dflash_jax.decode.verify import accept_greedy, accept_sampled, cut, frozen, without_stops
from dflash_jax.models import Drafter
from dflash_jax.nn.proposal import Lender, Proposal
from dflash_jax.state import (
    DecodeState,
    LayerCache,
    RowRules,
    StepOutput,
    Update,
    all_finite,
    clear_rows,
    commit,
    pack_output,
)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The modules of a target and its drafter, if any. Hashable: part of a program."""

    target: nn.Module
    drafter: Drafter | None
    exact: bool = True  # blocks step recurrent layers token by token (R3)
    taps_at: str = LATE  # where in a layer the drafter's taps are taken
    apart: bool = False  # the drafter lives on another device: a step's state hands it the taps

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states the drafter reads; the output of layer i is state i + 1."""
        return tuple(i + 1 for i in self.drafter.config.target_layer_ids) if self.drafter else ()

    @property
    def head(self) -> str:
        """The target's method that drafters speak through: its head without its softcap."""
        return "raw_logits" if self.target.config.final_softcap else "logits"

    def target_call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Runs the target module, or one of its methods by `method=`."""
        return self.target.apply({"params": params["target"]}, *args, **kwargs)

    def drafter_call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Runs the drafter module, or one of its methods by `method=`."""
        assert self.drafter is not None
        return self.drafter.apply({"params": params["drafter"]}, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafted block."""

    block: Int[Array, "B T"]  # anchor, then drafts
    q: Float[Array, "B R V"] | None  # what the drafts were drawn from, when sampling
    finite: Bool[Array, " B"]
    caches: tuple[LayerCache, ...]
    count: Int[Array, " B"] | None = None  # drafts worth verifying; None is all
    drafted: bool = True  # False: only the anchor counts


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
    target, draft, hidden = _forward(pair, params, state, tokens, chunked=True)
    last = jnp.maximum(count - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    raw = pair.target_call(params, hidden, method="logits")  # [B, 1, V]
    logits = shaping.applied(raw, tokens[:, :0]) if shaping else raw
    n, zero = jnp.minimum(count, 1), jnp.zeros_like(count)
    token = _choose(logits, zero, state.position + count, rules, sampled=sampled)
    floor = _floor(logits, zero, state.position + count, rules, sampled=sampled)
    likely = logprobs(raw, token[:, None]) if shaping else None
    out = pack_output(token[:, None], n, floor, _finite(raw, n), zero, likely)
    return commit(state, target, draft, count, token), out


def forced(
    pair: Pair,
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    anchor: Int[Array, " B"],
) -> DecodeState:
    """Feeds tokens the host dictates, taps included, and sets the next anchor (R7).

    Args:
      tokens: the pending anchor and the dictated tokens but the last.
      anchor: the last dictated token, pending for the next step.
    """
    target, draft, _ = _forward(pair, params, state, tokens, chunked=not pair.exact)
    return commit(state, target, draft, count, anchor)


def replace(state: DecodeState, rows: Bool[Array, " B"], anchor: Int[Array, " B"]) -> DecodeState:
    """Puts another token in the place of some rows' pending ones; no cache holds those (R6)."""
    return dataclasses.replace(state, anchor=jnp.where(rows, anchor, state.anchor))


def wipe(state: DecodeState, rows: Bool[Array, " B"]) -> DecodeState:
    """Zeroes rows whose caches may hold non-finite numbers; masks alone do not stop those."""
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
    draft, choice = _undrafted(block, state), {"sampled": sampled, "shaping": shaping}
    _, state, out = _verify(pair, params, state, draft, rules, **choice)
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
    drafted = _draft(
        pair, params, state, rules, width=width, sampled=sampled, min_survival=min_survival
    )
    choice = {"sampled": sampled, "shaping": shaping}
    _, state, out = _verify(pair, params, state, drafted, rules, **choice)
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
    found = _draft(pair, params, state, rules, **static)
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
    _, state, out = _verify(pair, params, state, found, rules, sampled=sampled, shaping=shaping)
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


def several(
    step: Callable[..., tuple[DecodeState, StepOutput]],
    pair: Pair,
    params: Params,
    state: DecodeState,
    rounds: Int[Array, ""],
    rules: RowRules,
    *,
    most: int,
    **static: Any,
) -> tuple[DecodeState, StepOutput]:
    """Decode steps one after another without the host.

    They end when every row is frozen, or once a row's numbers are not finite.

    Args:
      rounds: steps to make, up to `most`; 0 makes one that no row may need, to be timed.

    Returns:
      The state, and the answers [most, B, T+4]; those of steps that were not made are -1.
    """
    made = functools.partial(step, pair, params, rules=rules, **static)
    answer = jax.eval_shape(made, state)[1].packed
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

    none = jnp.full((most, *answer.shape), -1, answer.dtype)
    start = jnp.int32(0), jnp.bool_(True), state, none
    _, _, state, answers = jax.lax.while_loop(goes_on, go_on, start)
    return state, StepOutput(answers)


def _undrafted(block: Int[Array, "B T"], state: DecodeState) -> Draft:
    finite = jnp.ones_like(state.anchor, bool)
    return Draft(block=block, q=None, finite=finite, caches=state.draft, drafted=False)


def _draft(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
    min_survival: float = 0.0,
) -> Draft:
    """The drafter's proposal; where its output is not finite, mask tokens that verify will drop."""
    assert pair.drafter is not None
    config = pair.drafter.config
    masks = jnp.full((state.anchor.shape[0], width - 1), config.mask_token_id, state.anchor.dtype)
    lender = Lender(
        functools.partial(pair.target_call, params, method="embed"),
        functools.partial(pair.target_call, params, method=pair.head),
    )
    choose = Drafting(rules, state.position, sampled)
    with jax.named_scope("draft"):
        found: Proposal = pair.drafter_call(
            params,
            jnp.concatenate([state.anchor[:, None], masks], axis=1),
            state.draft,
            state.position,
            lender,
            choose,
            method="propose",
        )
    drafts = jnp.where(found.finite[:, None], found.tokens, masks)
    q, count = found.q_over(config.vocab_size), rules.drafts
    if q is not None:
        sure = jax.nn.one_hot(masks, config.vocab_size, dtype=q.dtype)
        q = jnp.where(found.finite[:, None, None], q, sure)
    if found.survival is not None and min_survival > 0:
        likely = (found.survival >= min_survival).sum(axis=1, dtype=jnp.int32)
        count = jnp.minimum(count, likely)
    block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    return Draft(block=block, q=q, finite=found.finite, caches=found.caches, count=count)


def _verify(
    pair: Pair,
    params: Params,
    state: DecodeState,
    draft: Draft,
    rules: RowRules,
    *,
    sampled: bool,
    shaping: Shaping | None = None,
) -> tuple[Float[Array, "B T V"], DecodeState, StepOutput]:
    """The target's pass over a block, the cut, the commit. The heart of every decode lane."""
    state = dataclasses.replace(state, draft=draft.caches)
    chunked = not pair.exact
    target, context, hidden = _forward(pair, params, state, draft.block, chunked=chunked)
    raw = pair.target_call(params, hidden, method="logits")  # [B, T, V]
    logits = shaping.applied(raw, draft.block[:, 1:]) if shaping else raw
    with jax.named_scope("verify"):
        n = jnp.ones_like(state.anchor)
        if not sampled:
            best = likeliest(logits)
            n = accept_greedy(draft.block, best, draft.count) if draft.drafted else n
            token = jnp.take_along_axis(best, n[:, None] - 1, axis=1)[:, 0]
        elif draft.q is not None:
            uniforms = jax.vmap(lambda k: jax.random.uniform(k, (draft.block.shape[1] - 1,)))(
                row_keys(rules, state.position, ACCEPT)
            )
            p = probabilities(logits, rules)
            n, rest = accept_sampled(draft.block[:, 1:], draft.q, p, uniforms, draft.count)
            token = draw(row_keys(rules, state.position + n, TOKEN), rest)
        else:
            token = _choose(logits, n - 1, state.position + n, rules, sampled=True)
        place = jnp.arange(draft.block.shape[1])[None, :]
        following = jnp.roll(draft.block, -1, axis=1)
        new = jnp.where(place == n[:, None] - 1, token[:, None], following)
        finite = _finite(raw, n)
        keep = jnp.where(finite, cut(n, new, state.anchor, state.position, rules), 0)
        last = jnp.maximum(keep - 1, 0)
        anchor = jnp.take_along_axis(new, last[:, None], axis=1)[:, 0]
        floor = _floor(logits, last, state.position + keep, rules, sampled=sampled)
        drafts = jnp.zeros_like(keep)
        if draft.drafted:
            most = jnp.full_like(keep, draft.block.shape[1] - 1)
            drafts = most if draft.count is None else draft.count
            drafts = jnp.where(draft.finite | (rules.drafts == 0), drafts, -1)
        likely = logprobs(raw, new) if shaping else None
        out = pack_output(new, keep, floor, finite, drafts, likely)
    with jax.named_scope("commit"):
        return logits, commit(state, target, context, keep, anchor), out


def _forward(
    pair: Pair, params: Params, state: DecodeState, tokens: Int[Array, "B T"], *, chunked: bool
) -> tuple[tuple[Update, ...], tuple[LayerCache, ...], Float[Array, "B T D"]]:
    """Runs T rows through the target and, from their taps, into the drafter's context."""
    # The barriers fence the target's pass in, so that XLA compiles it alike in every lane.
    tokens = jax.lax.optimization_barrier(tokens)
    with jax.named_scope("target"):
        where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": chunked}
        out = pair.target_call(params, tokens, state.target, state.position, **where)
    out = jax.lax.optimization_barrier(out)
    draft = out.taps if pair.apart else state.draft
    if pair.drafter is not None and not pair.apart:
        draft = pair.drafter_call(params, out.taps, draft, state.position, method="context")
    return out.caches, draft, out.hidden


def _choose(
    logits: Float[Array, "B T V"],
    at: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
    *,
    sampled: bool,
) -> Int[Array, " B"]:
    """The token that row `at` of the logits says; `position` is the place it will stand at."""
    row = jnp.take_along_axis(logits, at[:, None, None], axis=1)
    if not sampled:
        return likeliest(row[:, 0])
    return draw(row_keys(rules, position, TOKEN), probabilities(row, rules)[:, 0])


def _floor(
    logits: Float[Array, "B T V"],
    at: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
    *,
    sampled: bool,
) -> Int[Array, " B"]:
    """As `_choose`, with the stop set masked: what replaces a stop token (R6)."""
    row = without_stops(jnp.take_along_axis(logits, at[:, None, None], axis=1), rules)
    return _choose(row, jnp.zeros_like(at), position, rules, sampled=sampled)


def _finite(logits: Float[Array, "B T V"], n: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the logits that decided a row's n tokens are all finite."""
    rows = jnp.isfinite(logits).all(axis=-1)
    unused = jnp.arange(logits.shape[1])[None, :] >= n[:, None]
    return (rows | unused).all(axis=1)
