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
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import LATE
from dflash_jax.decode.sampling import ACCEPT, DRAFT, TOKEN, draw, probabilities, row_keys
from dflash_jax.decode.verify import accept_greedy, accept_sampled, cut, without_stops
from dflash_jax.models.dflash import DFlash
from dflash_jax.state import DecodeState, LayerCache, RowRules, StepOutput, commit, pack_output

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The modules of a target and its drafter, if any. Hashable: part of a program."""

    target: nn.Module
    drafter: DFlash | None
    taps_at: str = LATE  # where in a layer the drafter's taps are taken

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
) -> tuple[DecodeState, StepOutput]:
    """Feeds a prompt chunk; the first generated token means something after the last chunk.

    Args:
      count: real tokens of each row's chunk; 0 leaves a row untouched.
      fresh: rows that begin a new request, at position 0 whatever they held before.
    """
    state = dataclasses.replace(state, position=jnp.where(fresh, 0, state.position))
    target, draft, hidden = _forward(pair, params, state, tokens)
    last = jnp.maximum(count - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    logits = pair.target_call(params, hidden, method="logits")  # [B, 1, V]
    n, zero = jnp.minimum(count, 1), jnp.zeros_like(count)
    token = _choose(logits, zero, state.position + count, rules, sampled=sampled)
    floor = _floor(logits, zero, state.position + count, rules, sampled=sampled)
    out = pack_output(token[:, None], n, floor, _finite(logits, n), jnp.ones_like(n, bool))
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
    target, draft, _ = _forward(pair, params, state, tokens)
    return commit(state, target, draft, count, anchor)


def wipe(state: DecodeState, rows: Bool[Array, " B"]) -> DecodeState:
    """Zeroes rows whose caches may hold non-finite numbers; masks alone do not stop those."""

    def zero(cache: LayerCache) -> LayerCache:
        clear = rows[:, None, None, None]
        return jax.tree.map(lambda x: jnp.where(clear, jnp.zeros((), x.dtype), x), cache)

    return DecodeState(
        target=tuple(map(zero, state.target)),
        draft=tuple(map(zero, state.draft)),
        position=jnp.where(rows, 0, state.position),
        anchor=jnp.where(rows, 0, state.anchor),
    )


def plain(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
) -> tuple[DecodeState, StepOutput]:
    """One token per row by a block-wide forward whose other rows are junk (R1)."""
    junk = ((0, 0), (0, width - 1))
    block = jnp.pad(state.anchor[:, None], junk)
    _, state, out = _verify(pair, params, state, _undrafted(block, state), rules, sampled=sampled)
    return state, out


def speculative(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
) -> tuple[DecodeState, StepOutput]:
    """Drafts a block, verifies it, keeps what the target would have said itself."""
    drafted = _draft(pair, params, state, rules, width=width, sampled=sampled)
    _, state, out = _verify(pair, params, state, drafted, rules, sampled=sampled)
    return state, out


def _undrafted(block: Int[Array, "B T"], state: DecodeState) -> Draft:
    return Draft(block=block, q=None, finite=jnp.ones_like(state.anchor, bool), caches=state.draft)


def _draft(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
) -> Draft:
    """The drafter's proposal; where its output is not finite, mask tokens that verify will drop."""
    assert pair.drafter is not None
    mask = pair.drafter.config.mask_token_id
    masks = jnp.full((state.anchor.shape[0], width - 1), mask, state.anchor.dtype)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    with jax.named_scope("draft"):
        x = pair.target_call(params, block, method="embed")
        head = functools.partial(pair.target_call, params, method=pair.head)
        logits, caches = pair.drafter_call(
            params, x, state.draft, state.position, head, method="draft"
        )
        logits = logits[:, 1:]  # the anchor's own place predicts nothing
    finite = jnp.isfinite(logits).all(axis=(1, 2))
    logits = jnp.where(finite[:, None, None], logits, 0.0)
    if sampled:
        q = probabilities(logits, rules)
        sure = jax.nn.one_hot(masks, logits.shape[-1], dtype=q.dtype)
        q = jnp.where(finite[:, None, None], q, sure)
        drafts = draw(row_keys(rules, state.position, DRAFT), q)
    else:
        q = None
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts = jnp.where(finite[:, None], best, masks)
    block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    return Draft(block=block, q=q, finite=finite, caches=caches)


def _verify(
    pair: Pair,
    params: Params,
    state: DecodeState,
    draft: Draft,
    rules: RowRules,
    *,
    sampled: bool,
) -> tuple[Float[Array, "B T V"], DecodeState, StepOutput]:
    """The target's pass over a block, the cut, the commit. The heart of every decode lane."""
    drafting = draft.caches is not state.draft
    state = dataclasses.replace(state, draft=draft.caches)
    target, context, hidden = _forward(pair, params, state, draft.block)
    logits = pair.target_call(params, hidden, method="logits")  # [B, T, V]
    with jax.named_scope("verify"):
        if not sampled:
            best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            n = accept_greedy(draft.block, best) if drafting else jnp.ones_like(state.anchor)
            token = jnp.take_along_axis(best, n[:, None] - 1, axis=1)[:, 0]
        elif draft.q is not None:
            uniforms = jax.vmap(lambda k: jax.random.uniform(k, (draft.block.shape[1] - 1,)))(
                row_keys(rules, state.position, ACCEPT)
            )
            p = probabilities(logits, rules)
            n, rest = accept_sampled(draft.block[:, 1:], draft.q, p, uniforms)
            token = draw(row_keys(rules, state.position + n, TOKEN), rest)
        else:
            n = jnp.ones_like(state.anchor)
            token = _choose(logits, n - 1, state.position + n, rules, sampled=True)
        place = jnp.arange(draft.block.shape[1])[None, :]
        following = jnp.roll(draft.block, -1, axis=1)
        new = jnp.where(place == n[:, None] - 1, token[:, None], following)
        finite = _finite(logits, n)
        keep = jnp.where(finite, cut(n, new, state.anchor, state.position, rules), 0)
        last = jnp.maximum(keep - 1, 0)
        anchor = jnp.take_along_axis(new, last[:, None], axis=1)[:, 0]
        floor = _floor(logits, last, state.position + keep, rules, sampled=sampled)
        out = pack_output(new, keep, floor, finite, draft.finite)
    with jax.named_scope("commit"):
        return logits, commit(state, target, context, keep, anchor), out


def _forward(
    pair: Pair, params: Params, state: DecodeState, tokens: Int[Array, "B T"]
) -> tuple[tuple[LayerCache, ...], tuple[LayerCache, ...], Float[Array, "B T D"]]:
    """Writes T rows into target caches and, from their taps, into the drafter's context."""
    # The barriers fence the target's pass in, so that XLA compiles it alike in every lane.
    tokens = jax.lax.optimization_barrier(tokens)
    with jax.named_scope("target"):
        where = {"taps": pair.taps, "taps_at": pair.taps_at}
        out = pair.target_call(params, tokens, state.target, state.position, **where)
    out = jax.lax.optimization_barrier(out)
    draft = state.draft
    if pair.drafter is not None:
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
        return jnp.argmax(row[:, 0], axis=-1).astype(jnp.int32)
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
