"""Draft one block: the drafter's forward pass, then a choice of tokens by each row's rules."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.errors import PlanError
from dflash_jax.graph.protocols import Draft, DraftChoice
from dflash_jax.graph.state import DecodeState, RowRules, described, expect_state
from dflash_jax.graph.steps import sampling
from dflash_jax.graph.steps.acceptance import frozen
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.graph.steps.pair import Pair, Params
from dflash_jax.kernels.vocabulary import all_finite, argmax


def draft(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: DecodeInputs
) -> tuple[DecodeState, None, Draft]:
    """Draft a block after each row's anchor, moving no row: half of a speculative step."""
    options = pair.options
    sampler = RowDraftSampler(
        inputs.rules,
        state.anchor,
        state.position,
        num_drafts=options.block - 1,
        sampled=options.sampled,
        vocab_size=pair.target.config.vocab_size,
        kernels=options.kernels,
        confidence_threshold=options.confidence_threshold,
        keeps_logits=pair.keeps_logits,
    )
    shared = pair.shared(params)
    with jax.named_scope("draft"):
        result = pair.drafter_call(
            params,
            state.drafter,
            state.anchor,
            state.position,
            shared,
            sampler,
            method="propose",
        )
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Draft):
            raise PlanError(
                f"{type(pair.drafter).__name__}.propose returned {described(result)}; expected a"
                " tuple of a dj.graph.Draft, which the sampler makes, and the drafter's state"
            )
        drafted, drafter = result
        expect_state(drafter, state.drafter, f"{type(pair.drafter).__name__}.propose", "empty")
        drafted = _verifiable(pair, drafted, state.anchor, inputs.rules)
    return dataclasses.replace(state, drafter=drafter), None, drafted


def _verifiable(pair: Pair, drafted: Draft, anchor: Int[Array, " B"], rules: RowRules) -> Draft:
    """Return a draft that cannot change what the target decides, whatever the drafter made.

    The anchor is decided, so it leads the block. The target embeds unknown tokens as anything, NaN
    among them, so ids stay inside the vocabulary. Counts stay inside the block and the row's rule.
    """
    rows = len(anchor)
    width = pair.options.block
    num_drafts = width - 1
    vocab_size = pair.target.config.vocab_size
    if jnp.shape(drafted.block) != (rows, width):
        raise PlanError(
            f"{type(pair.drafter).__name__}.propose returned a block of shape"
            f" {jnp.shape(drafted.block)}; expected {(rows, width)}: the anchor and"
            f" {num_drafts} drafts of each row"
        )
    for name in ("finite", "num_drafts"):
        value = getattr(drafted, name)
        if value is not None and jnp.shape(value) not in ((), (rows,)):
            raise PlanError(
                f"{type(pair.drafter).__name__}.propose returned a draft whose {name} has the"
                f" shape {jnp.shape(value)}; expected {(rows,)}, or None"
            )
    drafts = jnp.clip(drafted.block[:, 1:].astype(jnp.int32), 0, vocab_size - 1)
    finite = jnp.ones(rows, bool) if drafted.finite is None else drafted.finite
    count = num_drafts if drafted.num_drafts is None else drafted.num_drafts
    count = jnp.minimum(jnp.clip(count, 0, num_drafts), rules.max_drafts)
    block = jnp.concatenate([anchor[:, None], drafts], axis=1)
    count = jnp.where(finite, count, 0).astype(jnp.int32)
    copied = drafted.copied if pair.copies else None
    logits = drafted.logits if pair.keeps_logits else None
    if pair.keeps_logits and logits is None:
        logits = certainly(drafts, vocab_size)
    return Draft(block, finite, count, copied, logits)


def certainly(tokens: Int[Array, "B R"], vocab_size: int) -> Float[Array, "B R V"]:
    """Return logits under which tokens have probability 1."""
    hit = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.bool_)
    return jnp.where(hit, 0.0, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class RowDraftSampler:
    """Chooses drafts by each row's sampling rules (a `protocols.DraftSampler`).

    Non-finite logits are never compared: their row chooses as if all logits were zero, and
    is reported as not finite.
    """

    rules: RowRules
    anchor: Int[Array, " B"]
    position: Int[Array, " B"]  # position of the anchor
    num_drafts: int
    sampled: bool
    vocab_size: int
    kernels: str
    confidence_threshold: float = 0.0
    keeps_logits: bool = False

    @property
    def idle(self) -> Bool[Array, " B"]:
        """Rows whose drafts are not verified."""
        return (self.rules.max_drafts == 0) | frozen(self.anchor, self.position, self.rules)

    def sample_all(
        self, logits: Float[Array, "B R N"], ids: Int[Array, " N"] | None = None
    ) -> DraftChoice:
        """Choose all positions at once, each as the target would by these logits."""
        live = jnp.broadcast_to(~self.idle[:, None], logits.shape[:2])
        finite = all_finite(logits, self.kernels, live).all(axis=1)
        best = jnp.where(finite[:, None], argmax(logits, self.kernels, live), 0)
        if not self.sampled:
            return DraftChoice(best, finite)

        def drawn() -> Int[Array, "B R"]:
            draw = functools.partial(self._draw, ids=ids)
            position = self.position + 1
            known = jnp.where(finite[:, None, None], logits, 0.0)
            index = sampling.at_positions(draw, known, position, self.rules, self.kernels, live)
            return jnp.where(self.rules.temperature[:, None] > 0, index, best)

        index = jax.lax.cond(sampling.any_sampled(self.rules), drawn, lambda: best)
        return DraftChoice(index, finite)

    def sample_one(
        self, logits: Float[Array, "B N"], at: int, ids: Int[Array, "*rows N"] | None = None
    ) -> DraftChoice:
        """Choose position `at` of the block, from 0, as the target would by these logits."""
        live = ~self.idle
        finite = all_finite(logits, self.kernels, live)
        best = jnp.where(finite, argmax(logits, self.kernels, live), 0)
        if not self.sampled:
            return DraftChoice(best, finite)

        def drawn() -> Int[Array, " B"]:
            keys = sampling.row_keys(self.rules, self.position + 1 + at, sampling.TOKEN)
            known = jnp.where(finite[:, None], logits, 0.0)
            index = self._draw(keys, known, self.rules, ids=ids, live=live)
            return jnp.where(self.rules.temperature > 0, index, best)

        index = jax.lax.cond(sampling.any_sampled(self.rules), drawn, lambda: best)
        return DraftChoice(index, finite)

    def _draw(
        self,
        keys: Key[Array, " M"],
        logits: Float[Array, "M N"],
        rules: RowRules,
        *,
        ids: Int[Array, "*rows N"] | None,
        live: Bool[Array, " M"] | None = None,
    ) -> Int[Array, " M"]:
        """Return the index that each row draws, as the target will."""
        if ids is None:
            return sampling.draw(keys, logits, rules, self.kernels, live)
        ids = jnp.broadcast_to(ids, logits.shape)
        rows = jnp.arange(len(logits))[:, None]

        def spread(x: Float[Array, "M N"]) -> Float[Array, "M V"]:
            return jnp.full((len(x), self.vocab_size), -jnp.inf, x.dtype).at[rows, ids].set(x)

        token = sampling.draw(keys, logits, rules, self.kernels, live, spread)
        return jnp.argmax(ids == token[:, None], axis=1).astype(token.dtype)

    def draft(
        self,
        tokens: Int[Array, "B R"],
        finite: Bool[Array, " B"],
        *,
        confidence: Float[Array, "B R"] | None = None,
        logits: Float[Array, "B R N"] | None = None,
        ids: Int[Array, "*positions N"] | None = None,
    ) -> Draft:
        """Assemble the chosen tokens into a draft; rows that are not finite get none."""
        drafts = jnp.where(finite[:, None], tokens, 0)
        num_drafts = None
        if confidence is not None and self.confidence_threshold > 0:
            num_drafts = (confidence >= self.confidence_threshold).sum(axis=1, dtype=jnp.int32)
        block = jnp.concatenate([self.anchor[:, None], drafts], axis=1)
        kept = None
        if self.keeps_logits and logits is not None:
            kept = self._whole(jnp.where(finite[:, None, None], logits, 0.0), ids)
        return Draft(block, finite, num_drafts, logits=kept)

    def _whole(
        self, logits: Float[Array, "B R N"], ids: Int[Array, "*positions N"] | None
    ) -> Float[Array, "B R V"]:
        """Return float32 logits of the whole vocabulary."""
        logits = logits.astype(jnp.float32)
        if ids is None:
            return logits
        rows, num_drafts, _ = logits.shape
        row = jnp.arange(rows)[:, None, None]
        position = jnp.arange(num_drafts)[None, :, None]
        whole = jnp.full((rows, num_drafts, self.vocab_size), -jnp.inf)
        return whole.at[row, position, jnp.broadcast_to(ids, logits.shape)].set(logits)

    def certain(self, tokens: Int[Array, "B R"], count: Int[Array, " B"] | None = None) -> Draft:
        """Draft these tokens, each with probability 1.

        Args:
          count: number of drafts of each row that may be verified; by default all.
        """
        drafted = self.draft(tokens, jnp.ones(tokens.shape[0], bool))
        logits = certainly(tokens, self.vocab_size) if self.keeps_logits else None
        return dataclasses.replace(drafted, num_drafts=count, logits=logits)
