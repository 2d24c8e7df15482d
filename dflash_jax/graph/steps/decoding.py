"""The steps that run a model: forward pass, decision, commit.

| step              | forward pass over        | tokens committed                    |
| ----------------- | ------------------------ | ----------------------------------- |
| `prefill`         | a prompt chunk           | its `num_tokens` tokens             |
| `plain`           | anchor and padding       | 1                                   |
| `speculative`     | anchor and drafts        | the anchor and the accepted drafts  |
| `forced_tokens`   | tokens given by the host | `num_tokens`                        |
| `prompt_logprobs` | a prompt chunk           | none                                |

Every step is a pure function `(pair, params, state, logits_state, inputs) -> (state, logits_state,
output)`, where the logits state is None unless logits are processed. A forward pass writes all its
tokens into the caches; `commit` then moves the row's one position past those that are kept. Slots
after the position are garbage: masked, and overwritten by the next call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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
from dflash_jax.graph.steps.acceptance import accept, cut, finite_positions, frozen
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
    options = pair.options
    rules = inputs.rules
    lengths = inputs.num_tokens
    state = restart_rows(state, inputs.fresh)
    target, drafter, hidden = forward(
        pair, params, state, inputs.tokens, chunked=True, num_live=lengths
    )
    last = jnp.maximum(lengths - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    raw = logits_of(pair, params, hidden)  # [B, 1, V]
    logits = raw
    if logits_state is not None:
        logits = logits_state.process(raw, inputs.tokens[:, :0], inputs.masks)
    num_tokens = jnp.minimum(lengths, 1)
    zero = jnp.zeros_like(lengths)
    token = sampling.choose_token(
        logits,
        zero,
        state.position + lengths,
        rules,
        sampled=options.sampled,
        kernels=options.kernels,
    )
    replacement = sampling.replacement_token(
        logits,
        token,
        zero,
        state.position + lengths,
        rules,
        sampled=options.sampled,
        kernels=options.kernels,
    )
    logprobs = None
    if logits_state is not None:
        logprobs = logits_state.logprobs(raw, token[:, None])
    finite = (finite_positions(raw, options.kernels) > 0) | (num_tokens == 0)
    odds = sampling.tool_call_margin(raw, token, zero, rules, options.kernels)
    tops = _top_tokens(pair, None, raw)
    out = pack_output(
        token[:, None],
        num_tokens,
        replacement,
        finite,
        zero,
        tops=tops,
        tool_call_margin=odds,
    )
    out = dataclasses.replace(out, logprobs=logprobs)
    drafter = pair.committed(state.drafter, drafter, lengths)
    state = commit(state, target, drafter, lengths, token)
    if logits_state is not None:
        logits_state = logits_state.count(out)
    return state, logits_state, out


def plain(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> StepResult:
    """Decode one token per row, in a block padded to the width of drafted ones."""
    padding = pair.options.block - 1
    padded = Draft(jnp.pad(state.anchor[:, None], ((0, 0), (0, padding))))
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


class Decision(NamedTuple):
    """What the target decided about a block, and how much of it is committed.

    Attributes:
      tokens: accepted drafts, and the token after them, which is the next anchor.
      num_finite: number of leading positions whose logits are finite.
      num_committed: number of tokens of the block that are committed.
      idle: rows that are frozen, whose numbers are not reported.
      last: position in the block after which the next anchor was decided.
      anchor: the next anchor.
      end: position of the next anchor.
    """

    tokens: Int[Array, "B T"]
    num_finite: RowInts
    num_committed: RowInts
    idle: Bool[Array, " B"]
    last: RowInts
    anchor: RowInts
    end: RowInts


def verify_block(
    pair: Pair, params: Params, state: DecodeState, logits_state: Processing, inputs: DecodeInputs
) -> tuple[Logits, *StepResult]:
    """Verify a block as `verify` does, and return the processed logits before its results."""
    assert inputs.draft is not None
    drafted = inputs.draft
    block = drafted.block
    rules = inputs.rules
    num_live = _num_live(pair, drafted, state, rules)
    live = None
    if num_live is not None:
        live = jnp.arange(block.shape[1])[None, :] < num_live[:, None]
    target, drafter, hidden = forward(
        pair, params, state, block, chunked=not pair.options.exact, num_live=num_live
    )
    # Reports, the pair's own acceptance and logits processing read the logits of all tokens.
    reads_all = logits_state is not None or pair.keeps_logits
    raw = logits_of(pair, params, hidden, None if reads_all else num_live)
    logits = raw
    if logits_state is not None:
        logits = logits_state.process(raw, block[:, 1:], inputs.masks)
    with jax.named_scope("verify"):
        processed = logits_state is not None
        decision = _decide(pair, state, inputs, raw, logits, live, processed=processed)
        out = _report(pair, logits_state, inputs, raw, logits, decision)
    with jax.named_scope("commit"):
        drafter = pair.committed(state.drafter, drafter, decision.num_committed)
        state = commit(state, target, drafter, decision.num_committed, decision.anchor)
    if logits_state is not None:
        logits_state = logits_state.count(out)
    return logits, state, logits_state, out


def _num_live(pair: Pair, drafted: Draft, state: DecodeState, rules: RowRules) -> RowInts | None:
    """Return how many tokens of each row's block count: anchors of running rows, and drafts made.

    None if the target computes all of them in any case.
    """
    if not pair.skips_dead_tokens:
        return None
    num_tokens = 1 if drafted.num_drafts is None else 1 + drafted.num_drafts
    return jnp.where(frozen(state.anchor, state.position, rules), 0, num_tokens)


def _decide(
    pair: Pair,
    state: DecodeState,
    inputs: DecodeInputs,
    raw: Logits,
    logits: Logits,
    live: Bool[Array, "B T"] | None,
    *,
    processed: bool,
) -> Decision:
    """Decide the tokens of a block, and how many of its tokens are committed.

    Args:
      raw: the target's logits.
      logits: the same after logits processing, from which tokens are chosen.
      live: positions that count; None if all do.
      processed: whether logits were processed: then those of positions that do not count are no
        zeros.
    """
    drafted = inputs.draft
    rules = inputs.rules
    assert drafted is not None
    known = None if processed else live
    tokens, num_decided = _decided(pair, drafted, logits, known, state.position, rules)
    num_finite = finite_positions(raw, pair.options.kernels, live)
    num_committed = cut(
        jnp.minimum(num_decided, num_finite), tokens, state.anchor, state.position, rules
    )
    idle = frozen(state.anchor, state.position, rules)
    last = jnp.maximum(num_committed - 1, 0)
    anchor = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
    end = state.position + num_committed
    return Decision(tokens, num_finite, num_committed, idle, last, anchor, end)


def _report(
    pair: Pair,
    logits_state: Processing,
    inputs: DecodeInputs,
    raw: Logits,
    logits: Logits,
    decision: Decision,
) -> StepOutput:
    """Return the output of a step by what it decided; logits as for `_decide`."""
    options = pair.options
    drafted = inputs.draft
    assert drafted is not None
    block = drafted.block
    rules = inputs.rules
    replacement = sampling.replacement_token(
        logits,
        decision.anchor,
        decision.last,
        decision.end,
        rules,
        sampled=options.sampled,
        kernels=options.kernels,
    )
    num_drafts = _reported_num_drafts(drafted, rules, decision)
    logprobs = None
    if logits_state is not None:
        logprobs = logits_state.logprobs(raw, decision.tokens)
    odds = sampling.tool_call_margin(raw, decision.anchor, decision.last, rules, options.kernels)
    drafting = drafted.num_drafts is not None
    drafts = None
    if pair.output_sizes(block.shape[1], drafting=drafting).drafts:
        drafts = block[:, 1:]
    tops = _top_tokens(pair, drafted.logits, raw)
    finite = (decision.num_finite > 0) | decision.idle
    out = pack_output(
        decision.tokens,
        decision.num_committed,
        replacement,
        finite,
        num_drafts,
        drafts=drafts,
        tops=tops,
        tool_call_margin=odds,
    )
    return dataclasses.replace(out, logprobs=logprobs)


def _reported_num_drafts(drafted: Draft, rules: RowRules, decision: Decision) -> RowInts:
    """Return the number of verified drafts of each row, as in its column of the output.

    -1 where the drafter's numbers are not finite, unless the row does not draft.
    """
    num_drafts = jnp.zeros_like(decision.num_committed)
    if drafted.num_drafts is None or drafted.finite is None:
        return num_drafts
    usable = drafted.finite | (rules.max_drafts == 0) | decision.idle
    num_drafts = jnp.where(usable, drafted.num_drafts, -1)
    if drafted.copied is not None:
        num_drafts += jnp.where(drafted.copied & (num_drafts > 0), COPIED, 0)
    return num_drafts


def _decided(
    pair: Pair,
    drafted: Draft,
    logits: Logits,
    live: Bool[Array, "B T"] | None,
    position: RowInts,
    rules: RowRules,
) -> tuple[Int[Array, "B T"], RowInts]:
    """Return the decided tokens, accepted drafts first, and how many of them are valid."""
    block = drafted.block
    num_drafts = drafted.num_drafts
    if num_drafts is None:
        logits = logits[:, :1]
        live = None if live is None else live[:, :1]
    chosen = sampling.choose_tokens(
        logits,
        position + 1,
        rules,
        sampled=pair.options.sampled,
        kernels=pair.options.kernels,
        live=live,
    )
    if num_drafts is None:
        num_decided = jnp.ones_like(position)
    else:
        num_decided = accept(block, chosen, num_drafts)
    token = jnp.take_along_axis(chosen, num_decided[:, None] - 1, axis=1)
    if pair.acceptance is not None and num_drafts is not None:
        num_decided, token = _own_decision(pair, drafted, logits, chosen, position, rules)
    index = jnp.arange(block.shape[1])[None, :]
    following = jnp.roll(block, -1, axis=1)
    return jnp.where(index == num_decided[:, None] - 1, token, following), num_decided


def _own_decision(
    pair: Pair,
    drafted: Draft,
    logits: Logits,
    chosen: Int[Array, "B T"],
    position: RowInts,
    rules: RowRules,
) -> tuple[RowInts, Int[Array, "B 1"]]:
    """Return the number of decided tokens and the last of them, by the pair's own acceptance.

    Tokens that masks exclude are not decided, and rows without drafts decode plainly.

    Raises:
      PlanError: the acceptance returns arrays of other shapes.
    """
    assert pair.acceptance is not None
    assert drafted.num_drafts is not None
    assert drafted.logits is not None  # the pair keeps them
    drafts = drafted.block[:, 1:]
    draft_logits = jnp.take_along_axis(logits[:, :-1], drafts[:, :, None], axis=2)[:, :, 0]
    able = draft_logits > -jnp.inf
    able = able & (jnp.arange(drafts.shape[1])[None] < drafted.num_drafts[:, None])
    count = jnp.cumprod(able.astype(jnp.int32), axis=1).sum(axis=1)
    positions = position[:, None] + 1 + jnp.arange(chosen.shape[1])[None]
    keys = jax.vmap(lambda at: sampling.row_keys(rules, at, sampling.ACCEPTANCE), 1, 1)(positions)
    verification = Verification(
        drafts, count, drafted.logits, logits, chosen, rules.temperature, keys
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        accepted, token = pair.acceptance(verification)
    accepted = jnp.asarray(accepted, jnp.int32)
    token = jnp.asarray(token, jnp.int32)
    if accepted.shape != count.shape or token.shape != count.shape:
        raise PlanError(
            f"the pair's acceptance returned shapes {accepted.shape} and {token.shape}; expected"
            f" {count.shape} twice: accepted drafts, and the token after them, of each row"
        )
    within = jnp.clip(accepted, 0, count)
    own = jnp.take_along_axis(chosen, within[:, None], axis=1)
    token = jnp.clip(token, 0, logits.shape[2] - 1)[:, None]
    last = jnp.take_along_axis(logits, within[:, None, None], axis=1)[:, 0]
    allowed = (within == accepted) & (count > 0)
    allowed &= jnp.take_along_axis(last, token, axis=1)[:, 0] > -jnp.inf
    return 1 + within, jnp.where(allowed[:, None], token, own)


def _top_tokens(pair: Pair, drafts: Logits | None, target: Logits) -> tuple[TopTokens, ...]:
    """Return the most probable tokens of drafter and target that the plan reports.

    Args:
      drafts: logits of the drafter; None if it made no drafts.
    """
    count = pair.options.report_top
    if not count:
        return ()
    top_tokens = []
    for logits in (target,) if drafts is None else (drafts, target):
        top, ids = top_k(logits, count)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top_tokens.append(TopTokens(ids, top - total))
    return tuple(top_tokens)


def forced_tokens(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: ForcedTokensInputs
) -> tuple[DecodeState, None, Bool[Array, " B"]]:
    """Feed tokens given by the host, taps included, and set the next anchor of forced rows.

    Returns:
      The state, and which rows' hidden states are finite. Requiring all hidden states keeps the
      target's pass whole: with the caches alone, its last layer would compile differently.
    """
    target, drafter, hidden = forward(
        pair,
        params,
        state,
        inputs.tokens,
        chunked=not pair.options.exact,
        num_live=inputs.num_tokens,
    )
    drafter = pair.committed(state.drafter, drafter, inputs.num_tokens)
    finite = jnp.isfinite(hidden).all(axis=(1, 2))
    after = commit(state, target, drafter, inputs.num_tokens, inputs.anchor)
    anchor = jnp.where(inputs.forced, inputs.anchor, state.anchor)
    return dataclasses.replace(after, anchor=anchor), None, finite


def prompt_logprobs(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: PromptLogprobsInputs
) -> tuple[DecodeState, None, Logprobs]:
    """Return the log-probability of the token after each token of a prompt chunk.

    Logits are computed for as many tokens at once as in a decode step.

    Returns:
      The state, in which no row has moved, and log-probabilities [1, C]. Those after the prompt's
      last token are undefined.
    """
    alone = state.position.shape[0] == 1
    one = restart_rows(state if alone else take_row(state, inputs.row), inputs.fresh)
    pair = dataclasses.replace(pair, drafter=None)
    target, _, hidden = forward(pair, params, one, inputs.tokens, chunked=True)
    chunk = inputs.tokens.shape[1]
    width = pair.options.block
    parts = -(-chunk // width)
    ends = ((0, 0), (0, parts * width - chunk))
    hidden_parts = jnp.pad(hidden, (*ends, (0, 0))).reshape(parts, 1, width, -1)
    following = jnp.pad(inputs.following, ends).reshape(parts, 1, width)

    def scored(part: Any) -> Logprobs:
        return logits_processing.logprobs(logits_of(pair, params, part[0]), part[1])

    logprobs = jax.lax.map(scored, (hidden_parts, following))
    logprobs = jax.tree.map(lambda x: x.reshape(1, parts * width, *x.shape[3:]), logprobs)
    logprobs = jax.tree.map(lambda x: x[:, :chunk], logprobs)
    if alone:  # the donated caches were written past the row's position
        state = commit(state, target, state.drafter, jnp.zeros_like(state.position), state.anchor)
    return state, None, logprobs


def update_drafter(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: UpdateDrafterInputs
) -> tuple[DecodeState, None, None]:
    """Update a drafter on a device of its own after a step of the target."""
    start = jnp.where(inputs.fresh, 0, state.position)
    drafter = pair.observe(params, state.drafter, inputs.observed, start)
    state = dataclasses.replace(state, position=start)
    num_committed = inputs.position - start
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
      run: a prefill of all rows of the state that it is called with.
      sizes: sizes of its output.
      inputs: arrays of one row, except for the rules, which are those of all rows.
    """
    row = inputs.row
    rules = inputs.rules
    assert row is not None
    one = dataclasses.replace(inputs, rules=take_row(rules, row), row=None)
    part = take_row((state, logits_state), row)
    logprobs = None
    if logits_state is not None:
        logprobs = no_logprobs(1, 1, logits_state.bias.shape[-1])
    packed = jnp.zeros((1, sizes.columns(rules)), jnp.int32)
    empty = StepOutput(packed, logprobs, rules.opening is not None, top=sizes.top)

    def cond(carry: Any) -> Bool[Array, ""]:
        return carry[0]

    def body(carry: Any) -> Any:
        done = ~carry[0]
        *part, out = run(params, *carry[1], one)
        return done, tuple(part), out

    # A loop of one iteration: otherwise XLA reads the row where it is used, and copies all rows to
    # write it back.
    _, part, out = jax.lax.while_loop(cond, body, (row >= 0, part, empty))
    return *put_row((state, logits_state), part, row), out
