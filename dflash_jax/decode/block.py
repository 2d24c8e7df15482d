"""A block of tokens on its way: drafted, fed to the target, cut, committed. The heart of a step."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import LATE
from dflash_jax.decode.logits_processing import Shaping
from dflash_jax.decode.sampling import (
    ACCEPT,
    FLOOR,
    TOKEN,
    Drafting,
    any_sampled,
    draw,
    likeliest,
    probabilities,
    row_keys,
)
from dflash_jax.decode.verify import (
    accept_greedy,
    accept_sampled,
    best_choice,
    cut,
    frozen,
    is_stop,
    without_stops,
)
from dflash_jax.models import Drafter
from dflash_jax.nn.proposal import Lender, Proposal
from dflash_jax.state import (
    DecodeState,
    LayerCache,
    RowRules,
    StepOutput,
    Update,
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


def undrafted(block: Int[Array, "B T"], state: DecodeState) -> Draft:
    finite = jnp.ones_like(state.anchor, bool)
    return Draft(block=block, q=None, finite=finite, caches=state.draft, drafted=False)


def draft_block(
    pair: Pair,
    params: Params,
    state: DecodeState,
    rules: RowRules,
    *,
    width: int,
    sampled: bool,
    min_survival: float = 0.0,
) -> Draft:
    """The drafter's proposal; where its output is not finite, mask tokens that do not count.

    A row then says what a plain step would say, drawn tokens too.
    """
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
    q, count = found.q_over(config.vocab_size), jnp.where(found.finite, rules.drafts, 0)
    if found.survival is not None and min_survival > 0:
        likely = (found.survival >= min_survival).sum(axis=1, dtype=jnp.int32)
        count = jnp.minimum(count, likely)
    block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    return Draft(block=block, q=q, finite=found.finite, caches=found.caches, count=count)


def verify_block(
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
    target, context, hidden = forward(pair, params, state, draft.block, chunked=chunked)
    raw = logits_of(pair, params, hidden)
    logits = shaping.applied(raw, draft.block[:, 1:]) if shaping else raw
    with jax.named_scope("verify"):
        best = likeliest(logits)
        n = jnp.ones_like(state.anchor)
        n = accept_greedy(draft.block, best, draft.count) if draft.drafted else n
        token = jnp.take_along_axis(best, n[:, None] - 1, axis=1)[:, 0]
        if sampled:
            n, token = jax.lax.cond(
                any_sampled(rules),
                functools.partial(_drawn, draft, logits, state.position, rules),
                lambda *greedy: greedy,
                n,
                token,
            )
        place = jnp.arange(draft.block.shape[1])[None, :]
        following = jnp.roll(draft.block, -1, axis=1)
        new = jnp.where(place == n[:, None] - 1, token[:, None], following)
        good = finite_places(raw)
        keep = cut(jnp.minimum(n, good), new, state.anchor, state.position, rules)
        stands = frozen(state.anchor, state.position, rules)  # and says nothing of its numbers
        last = jnp.maximum(keep - 1, 0)
        anchor = jnp.take_along_axis(new, last[:, None], axis=1)[:, 0]
        least = floor(logits, anchor, last, state.position + keep, rules, sampled=sampled)
        drafts = jnp.zeros_like(keep)
        if draft.drafted:
            most = jnp.full_like(keep, draft.block.shape[1] - 1)
            drafts = most if draft.count is None else draft.count
            drafts = jnp.where(draft.finite | (rules.drafts == 0) | stands, drafts, -1)
        likely = shaping.logprobs(raw, new) if shaping else None
        odds = opening_odds(raw, anchor, last, rules)
        out = pack_output(new, keep, least, (good > 0) | stands, drafts, likely, odds)
    with jax.named_scope("commit"):
        return logits, commit(state, target, context, keep, anchor), out


def _drawn(
    draft: Draft,
    logits: Float[Array, "B T V"],
    position: Int[Array, " B"],
    rules: RowRules,
    n: Int[Array, " B"],
    token: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The verified prefix and the token after it; those given in greedy rows, drawn in others."""
    if draft.q is None:
        own = jnp.ones_like(n)
        drawn = choose(logits, own - 1, position + own, rules, sampled=True)
    else:
        uniforms = jax.vmap(lambda k: jax.random.uniform(k, (draft.block.shape[1] - 1,)))(
            row_keys(rules, position, ACCEPT)
        )
        p = probabilities(logits, rules)
        own, rest = accept_sampled(draft.block[:, 1:], draft.q, p, uniforms, draft.count)
        drawn = draw(row_keys(rules, position + own, TOKEN), rest)
    greedy = rules.temperature <= 0
    return jnp.where(greedy, n, own), jnp.where(greedy, token, drawn)


def forward(
    pair: Pair, params: Params, state: DecodeState, tokens: Int[Array, "B T"], *, chunked: bool
) -> tuple[tuple[Update, ...], tuple[LayerCache, ...], Float[Array, "B T D"]]:
    """Runs T rows through the target and, from their taps, into the drafter's context."""
    # The barriers fence the target's pass in, so that XLA compiles it alike in every lane: without
    # that of the positions, it would read the drafter's rotary table where there is one.
    tokens, start = jax.lax.optimization_barrier((tokens, state.position))
    with jax.named_scope("target"):
        where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": chunked}
        out = pair.target_call(params, tokens, state.target, start, **where)
    out = jax.lax.optimization_barrier(out)
    draft = out.taps if pair.apart else state.draft
    if pair.drafter is not None and not pair.apart:
        draft = pair.drafter_call(params, out.taps, draft, state.position, method="context")
    return out.caches, draft, out.hidden


def logits_of(pair: Pair, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """The target's logits, fenced in: lanes do different things with them, and XLA would join the
    last sum of a product with some of those and not with others."""
    return jax.lax.optimization_barrier(pair.target_call(params, hidden, method="logits"))


def choose(
    logits: Float[Array, "B T V"],
    at: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
    *,
    sampled: bool,
) -> Int[Array, " B"]:
    """The token that row `at` of the logits says; `position` is the place it will stand at."""
    row = jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]
    best = likeliest(row)
    return (
        _drawn_where(rules.temperature > 0, row, best, position, rules, TOKEN) if sampled else best
    )


def floor(
    logits: Float[Array, "B T V"],
    token: Int[Array, " B"],
    at: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
    *,
    sampled: bool,
) -> Int[Array, " B"]:
    """As `choose`, with the stop set masked: what replaces `token` where that is a stop token (R6).

    Drawn by a key of its own: under the one by which a residual said the stop token, other
    tokens of that residual are less likely than they should be. A row with `RowRules.choices` has
    the best of those instead, sampled or not. Other rows whose token is no stop token get the best
    one, which is unused.
    """
    row = jnp.take_along_axis(logits, at[:, None, None], axis=1)
    free = without_stops(row, rules)[:, 0]
    best = likeliest(free)
    if sampled:
        needed = is_stop(token[:, None], rules)[:, 0] & (rules.temperature > 0)
        best = _drawn_where(needed, free, best, position, rules, FLOOR)
    if rules.choices is None:
        return best
    return jnp.where(rules.choices[:, 0] >= 0, best_choice(row[:, 0], rules.choices), best)


def opening_odds(
    logits: Float[Array, "B T V"],
    token: Int[Array, " B"],
    at: Int[Array, " B"],
    rules: RowRules,
) -> Float[Array, " B"] | None:
    """Return the log-ratio of the probabilities of `RowRules.opening` and of the decided token.

    Args:
      token: the decided tokens; a row with `RowRules.choices` uses its best token instead.
      at: the place in `logits` that decided them.

    Returns:
      None where the rules have no `opening`; anything in rows whose `opening` is -1.
    """
    if rules.opening is None:
        return None
    row = jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0].astype(jnp.float32)
    pair = jnp.maximum(jnp.stack([rules.opening, token], axis=1), 0)
    opening, other = jnp.moveaxis(jnp.take_along_axis(row, pair, axis=1), 1, 0)
    if rules.choices is not None:
        other = jnp.where(rules.choices[:, 0] >= 0, row.max(axis=1), other)
    return opening - other


def _drawn_where(
    rows: Bool[Array, " B"],
    logits: Float[Array, "B V"],
    best: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
    purpose: int,
) -> Int[Array, " B"]:
    """Tokens drawn for some rows, the best ones of others; without such rows nothing is drawn."""

    def drawn() -> Int[Array, " B"]:
        p = probabilities(logits[:, None], rules)[:, 0]
        return jnp.where(rows, draw(row_keys(rules, position, purpose), p), best)

    return jax.lax.cond(rows.any(), drawn, lambda: best)


def finite_places(logits: Float[Array, "B T V"]) -> Int[Array, " B"]:
    """How many places of each row have finite logits, up to the first that has not."""
    places = logits.shape[1]
    good = jnp.isfinite(logits).all(axis=-1)
    return jnp.where(good, places, jnp.arange(places)[None, :]).min(axis=1)
