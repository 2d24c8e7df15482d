"""The steps that run a model: forward pass, decision, commit.

| step              | forward pass over        | tokens committed                    |
| ----------------- | ------------------------ | ----------------------------------- |
| `prefill`         | a prompt chunk           | its `num_fed` tokens                |
| `plain`           | anchor and padding       | 1                                   |
| `speculative`     | anchor and drafts        | the anchor and the accepted drafts  |
| `forced_tokens`   | tokens given by the host | `num_fed`                           |
| `prompt_logprobs` | a prompt chunk           | none                                |

Every step is a pure function `(pair, params, state, logits_state, inputs) -> (state, logits_state,
output)`, where the logits state is None unless logits are processed. A forward pass writes all its
tokens into the caches; `commit` then moves the row's one position past those that are kept. Slots
after the position are garbage: masked, and overwritten by the next call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.errors import PlanError
from dflash_jax.graph.protocols import Draft, Verification
from dflash_jax.graph.state import (
    COPIED,
    DecodeState,
    Logits,
    Logprobs,
    OutputSizes,
    RowInts,
    RowRules,
    StepOutput,
    TopTokens,
    commit,
    pack_output,
    restart_rows,
)
from dflash_jax.graph.steps import logits_processing, sampling
from dflash_jax.graph.steps.acceptance import accept, cut, finite_places, frozen
from dflash_jax.graph.steps.drafting import draft
from dflash_jax.graph.steps.inputs import (
    DecodeInputs,
    ForcedTokensInputs,
    PrefillInputs,
    PromptLogprobsInputs,
    UpdateDrafterInputs,
)
from dflash_jax.graph.steps.logits_processing import LogitsState, no_logprobs
from dflash_jax.graph.steps.pair import Pair, Params, forward, logits_of
from dflash_jax.kernels.caches import put_row, take_row
from dflash_jax.kernels.vocabulary import top_k

Processing = LogitsState | None  # None if logits are not processed
StepResult = tuple[DecodeState, Processing, StepOutput]
StepFn = Callable[..., StepResult]


def prefill(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: PrefillInputs
) -> StepResult:
    """Feed a prompt chunk; the token it decides is meaningful after the last chunk only."""
    num_fed, rules = inputs.num_fed, inputs.rules
    state = restart_rows(state, inputs.fresh)
    target, drafter, hidden = forward(
        pair, params, state, inputs.tokens, chunked=True, num_live=num_fed
    )
    last = jnp.maximum(num_fed - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    raw = logits = logits_of(pair, params, hidden)  # [B, 1, V]
    if logits_state:
        logits = logits_state.process(raw, inputs.tokens[:, :0], inputs.masks)
    num_tokens, zero = jnp.minimum(num_fed, 1), jnp.zeros_like(num_fed)
    how: dict[str, Any] = {"sampled": pair.sampled, "kernels": pair.kernels}
    token = sampling.choose_token(logits, zero, state.position + num_fed, rules, **how)
    best = sampling.next_best(logits, token, zero, state.position + num_fed, rules, **how)
    logprobs = logits_state.logprobs(raw, token[:, None]) if logits_state else None
    finite = (finite_places(raw, pair.kernels) > 0) | (num_tokens == 0)
    odds = sampling.call_odds(raw, token, zero, rules, pair.kernels)
    more: Any = {"call_odds": odds, "tops": _tops(pair, None, raw)}
    out = pack_output(token[:, None], num_tokens, best, finite, zero, **more)
    out = dataclasses.replace(out, logprobs=logprobs)
    drafter = pair.committed(state.drafter, drafter, num_fed)
    state = commit(state, target, drafter, num_fed, token)
    return state, logits_state and logits_state.count(out), out


def plain(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> StepResult:
    """Decode one token per row, in a block padded to the width of drafted ones."""
    padded = Draft(jnp.pad(state.anchor[:, None], ((0, 0), (0, pair.block - 1))))
    inputs = dataclasses.replace(inputs, draft=padded)
    return verify(pair, params, state, logits_state, inputs)


def speculative(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> StepResult:
    """Draft a block, verify it, and commit the tokens the target would have decided itself."""
    state, _, drafted = draft(pair, params, state, None, inputs)
    inputs = dataclasses.replace(inputs, draft=drafted)
    return verify(pair, params, state, logits_state, inputs)


def verify(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> StepResult:
    """Verify a block and commit what is accepted: the second half of a speculative step."""
    _, state, logits_state, out = verify_block(pair, params, state, logits_state, inputs)
    return state, logits_state, out


def verify_block(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> tuple[Logits, *StepResult]:
    """Verify a block as `verify` does, and return the processed logits before its results."""
    assert inputs.draft is not None
    drafted, rules, block = inputs.draft, inputs.rules, inputs.draft.block
    num_live = _num_live(pair, drafted, state, rules)
    live = None if num_live is None else jnp.arange(block.shape[1])[None, :] < num_live[:, None]
    target, drafter, hidden = forward(
        pair, params, state, block, chunked=not pair.exact, num_live=num_live
    )
    # All of them where others than the choice of tokens read them.
    whole = logits_state is not None or pair.report_top > 0 or pair.acceptance is not None
    raw = logits = logits_of(pair, params, hidden, None if whole else num_live)
    if logits_state:
        logits = logits_state.process(raw, block[:, 1:], inputs.masks)
    with jax.named_scope("verify"):
        seen = None if logits_state else live  # logits that are processed are no zeros
        tokens, num_decided = _decided(pair, drafted, logits, seen, state.position, rules)
        good = finite_places(raw, pair.kernels, live)
        num_committed = cut(
            jnp.minimum(num_decided, good), tokens, state.anchor, state.position, rules
        )
        idle = frozen(state.anchor, state.position, rules)  # its numbers are not reported
        last = jnp.maximum(num_committed - 1, 0)
        anchor = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
        end = state.position + num_committed
        how: dict[str, Any] = {"sampled": pair.sampled, "kernels": pair.kernels}
        best = sampling.next_best(logits, anchor, last, end, rules, **how)
        num_drafts = jnp.zeros_like(num_committed)
        if drafted.num_drafts is not None and drafted.finite is not None:
            reported = drafted.finite | (rules.max_drafts == 0) | idle
            num_drafts = jnp.where(reported, drafted.num_drafts, -1)
            if drafted.copied is not None:
                num_drafts += jnp.where(drafted.copied & (num_drafts > 0), COPIED, 0)
        logprobs = logits_state.logprobs(raw, tokens) if logits_state else None
        odds = sampling.call_odds(raw, anchor, last, rules, pair.kernels)
        drafting = drafted.num_drafts is not None
        reported = pair.output_sizes(block.shape[1], drafts=drafting).drafts
        more: Any = {"drafts": block[:, 1:] if reported else None, "call_odds": odds}
        more |= {"tops": _tops(pair, drafted.logits, raw)}
        finite = (good > 0) | idle
        out = pack_output(tokens, num_committed, best, finite, num_drafts, **more)
        out = dataclasses.replace(out, logprobs=logprobs)
    with jax.named_scope("commit"):
        drafter = pair.committed(state.drafter, drafter, num_committed)
        state = commit(state, target, drafter, num_committed, anchor)
    return logits, state, logits_state and logits_state.count(out), out


def _num_live(pair: Pair, drafted: Draft, state: DecodeState, rules: RowRules) -> RowInts | None:
    """Return how many tokens of each row's block count: anchors of running rows, and drafts made.

    None if the target computes all of them in any case.
    """
    if not pair.skips_dead_tokens:
        return None
    fed = 1 if drafted.num_drafts is None else 1 + drafted.num_drafts
    return jnp.where(frozen(state.anchor, state.position, rules), 0, fed)


def _decided(
    pair: Pair,
    drafted: Draft,
    logits: Logits,
    live: Bool[Array, "B T"] | None,
    position: RowInts,
    rules: RowRules,
) -> tuple[Int[Array, "B T"], RowInts]:
    """Return the decided tokens, accepted drafts first, and how many of them are valid."""
    block, count = drafted.block, drafted.num_drafts
    if count is None:
        logits, live = logits[:, :1], None if live is None else live[:, :1]
    how: dict[str, Any] = {"sampled": pair.sampled, "kernels": pair.kernels, "live": live}
    chosen = sampling.choose_tokens(logits, position + 1, rules, **how)
    num_decided = jnp.ones_like(position) if count is None else accept(block, chosen, count)
    token = jnp.take_along_axis(chosen, num_decided[:, None] - 1, axis=1)
    if pair.acceptance is not None and count is not None:
        num_decided, token = _own_decision(pair, drafted, logits, chosen, (position, rules))
    place = jnp.arange(block.shape[1])[None, :]
    following = jnp.roll(block, -1, axis=1)
    return jnp.where(place == num_decided[:, None] - 1, token, following), num_decided


def _own_decision(
    pair: Pair,
    drafted: Draft,
    logits: Logits,
    chosen: Int[Array, "B T"],
    where: tuple[RowInts, RowRules],
) -> tuple[RowInts, Int[Array, "B 1"]]:
    """Return the number of decided tokens and the last of them, by the pair's own acceptance.

    Tokens that masks exclude are not decided, and rows without drafts decode plainly.
    """
    assert pair.acceptance is not None
    assert drafted.num_drafts is not None
    (position, rules), drafts = where, drafted.block[:, 1:]
    odds = jnp.take_along_axis(logits[:, :-1], drafts[:, :, None], axis=2)[:, :, 0]
    able = (odds > -jnp.inf) & (jnp.arange(drafts.shape[1])[None] < drafted.num_drafts[:, None])
    count = jnp.cumprod(able.astype(jnp.int32), axis=1).sum(axis=1)
    places = position[:, None] + 1 + jnp.arange(chosen.shape[1])[None]
    keys = jax.vmap(lambda at: sampling.row_keys(rules, at, sampling.ACCEPTANCE), 1, 1)(places)
    assert drafted.logits is not None  # the pair keeps them
    given = Verification(drafts, count, drafted.logits, logits, chosen, rules.temperature, keys)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        accepted, token = pair.acceptance(given)
    accepted, token = jnp.asarray(accepted, jnp.int32), jnp.asarray(token, jnp.int32)
    if accepted.shape != count.shape or token.shape != count.shape:
        raise PlanError(
            f"the pair's acceptance returned shapes {accepted.shape} and {token.shape}; expected"
            f" {count.shape} twice: accepted drafts, and the token after them, of each row"
        )
    within = jnp.clip(accepted, 0, count)
    own = jnp.take_along_axis(chosen, within[:, None], axis=1)
    token = jnp.clip(token, 0, logits.shape[2] - 1)[:, None]
    last = jnp.take_along_axis(logits, within[:, None, None], axis=1)[:, 0]
    right = (within == accepted) & (count > 0)
    right &= jnp.take_along_axis(last, token, axis=1)[:, 0] > -jnp.inf
    return 1 + within, jnp.where(right[:, None], token, own)


def _tops(pair: Pair, drafts: Logits | None, target: Logits) -> tuple[TopTokens, ...]:
    """Return the most probable tokens of drafter and target that the plan reports."""
    if not pair.report_top:
        return ()
    found = []
    for logits in (target,) if drafts is None else (drafts, target):
        top, ids = top_k(logits, pair.report_top)
        found.append(TopTokens(ids, top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)))
    return tuple(found)


def forced_tokens(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: ForcedTokensInputs
) -> tuple[DecodeState, None, Bool[Array, " B"]]:
    """Feed tokens given by the host, taps included, and set the next anchor of forced rows.

    Returns:
      The state, and which rows' hidden states are finite. Requiring all hidden states keeps the
      target's pass whole: with the caches alone, its last layer would compile differently.
    """
    target, drafter, hidden = forward(
        pair, params, state, inputs.tokens, chunked=not pair.exact, num_live=inputs.num_fed
    )
    drafter = pair.committed(state.drafter, drafter, inputs.num_fed)
    finite = jnp.isfinite(hidden).all(axis=(1, 2))
    after = commit(state, target, drafter, inputs.num_fed, inputs.anchor)
    anchor = jnp.where(inputs.forced, inputs.anchor, state.anchor)
    return dataclasses.replace(after, anchor=anchor), None, finite


def prompt_logprobs(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: PromptLogprobsInputs
) -> tuple[DecodeState, None, Logprobs]:
    """Return the log-probability of the token after each token of a prompt chunk.

    Logits are computed for as many places at once as in a decode step.

    Returns:
      The state, in which no row has moved, and log-probabilities [1, C]. Those after the prompt's
      last token are undefined.
    """
    alone = state.position.shape[0] == 1
    one = restart_rows(state if alone else take_row(state, inputs.row), inputs.fresh)
    pair = dataclasses.replace(pair, drafter=None)
    target, _, hidden = forward(pair, params, one, inputs.tokens, chunked=True)
    chunk, width = inputs.tokens.shape[1], pair.block
    parts = -(-chunk // width)
    ends = ((0, 0), (0, parts * width - chunk))
    places = jnp.pad(hidden, (*ends, (0, 0))).reshape(parts, 1, width, -1)
    following = jnp.pad(inputs.following, ends).reshape(parts, 1, width)

    def scored(part: Any) -> Logprobs:
        return logits_processing.logprobs(logits_of(pair, params, part[0]), part[1])

    found = jax.lax.map(scored, (places, following))
    found = jax.tree.map(lambda x: x.reshape(1, parts * width, *x.shape[3:]), found)
    found = jax.tree.map(lambda x: x[:, :chunk], found)
    if alone:  # the donated caches were written past the row's position
        state = commit(state, target, state.drafter, jnp.zeros_like(state.position), state.anchor)
    return state, None, found


def update_drafter(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: UpdateDrafterInputs
) -> tuple[DecodeState, None, None]:
    """Update a drafter on a device of its own after a step of the target."""
    start = jnp.where(inputs.fresh, 0, state.position)
    drafter = pair.observe(params, state.drafter, inputs.observed, start)
    state, num_committed = dataclasses.replace(state, position=start), inputs.position - start
    drafter = pair.committed(state.drafter, drafter, num_committed)
    after = commit(state, (), drafter, num_committed, inputs.anchor)
    anchor = jnp.where(inputs.forced, inputs.anchor, after.anchor)
    return dataclasses.replace(after, anchor=anchor), None, None


def single_row(
    run: StepFn,
    params: Params,
    state: DecodeState,
    logits_state: Processing,
    inputs: PrefillInputs,
    *,
    sizes: OutputSizes,
) -> StepResult:
    """Run a prefill on one row only; the others cost nothing and keep their bits.

    Args:
      run: a prefill of all rows of the state that it is given.
      sizes: of its output.
      inputs: arrays of one row, except for the rules, which are those of all rows.
    """
    row, rules = inputs.row, inputs.rules
    assert row is not None
    one = dataclasses.replace(inputs, rules=take_row(rules, row), row=None)
    part = take_row((state, logits_state), row)
    # A loop of one iteration: otherwise XLA reads the row where it is used, and copies all rows to
    # write it back.
    logprobs = no_logprobs(1, 1, logits_state.bias.shape[-1]) if logits_state else None
    packed = jnp.zeros((1, sizes.columns(rules)), jnp.int32)
    empty = StepOutput(packed, logprobs, rules.opening is not None, top=sizes.top)

    def cond(carry: Any) -> Bool[Array, ""]:
        return carry[0]

    def body(carry: Any) -> Any:
        done = ~carry[0]
        *part, out = run(params, *carry[1], one)
        return done, tuple(part), out

    _, part, out = jax.lax.while_loop(cond, body, (row >= 0, part, empty))
    return *put_row((state, logits_state), part, row), out
