"""Draft one block: the drafter's forward pass, then a choice of tokens by each row's rules."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.errors import PlanError
from dflash_jax.graph.protocols import Draft, DraftChoice
from dflash_jax.graph.state import DecodeState, RowRules
from dflash_jax.graph.steps import sampling
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.graph.steps.pair import Pair, Params
from dflash_jax.kernels.vocabulary import all_finite, argmax


def draft(
    pair: Pair, params: Params, state: DecodeState, logits_state: None, inputs: DecodeInputs
) -> tuple[DecodeState, None, Draft]:
    """Draft a block after each row's anchor, moving no row: half of a speculative step."""
    sampler = RowDraftSampler(
        inputs.rules,
        state.anchor,
        state.position,
        places=pair.block - 1,
        sampled=pair.sampled,
        vocab_size=pair.target.config.vocab_size,
        min_survival=pair.min_survival,
    )
    given = (state.drafter, state.anchor, state.position, pair.shared(params), sampler)
    with jax.named_scope("draft"):
        drafted, drafter = pair.drafter_call(params, *given, method="propose")
        drafted = _verifiable(pair, drafted, state.anchor, inputs.rules)
    return dataclasses.replace(state, drafter=drafter), None, drafted


def _verifiable(pair: Pair, drafted: Draft, anchor: Int[Array, " B"], rules: RowRules) -> Draft:
    """Return a draft that cannot change what the target decides, whatever the drafter made.

    The anchor is decided, so it leads the block. The target embeds unknown tokens as anything, NaN
    among them, so ids stay inside the vocabulary. Counts stay inside the block and the row's rule.
    """
    rows, places, vocab = len(anchor), pair.block - 1, pair.target.config.vocab_size
    if jnp.shape(drafted.block) != (rows, pair.block):
        raise PlanError(
            f"{type(pair.drafter).__name__}.propose returned a block of shape"
            f" {jnp.shape(drafted.block)}; expected {(rows, pair.block)}: the anchor and"
            f" {places} drafts of each row"
        )
    drafts = jnp.clip(drafted.block[:, 1:].astype(jnp.int32), 0, vocab - 1)
    finite = jnp.ones(rows, bool) if drafted.finite is None else drafted.finite
    count = places if drafted.num_drafts is None else drafted.num_drafts
    count = jnp.minimum(jnp.clip(count, 0, places), rules.max_drafts)
    block = jnp.concatenate([anchor[:, None], drafts], axis=1)
    return Draft(block, drafted.q, finite, jnp.where(finite, count, 0).astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class RowDraftSampler:
    """Chooses drafts by each row's sampling rules (a `protocols.DraftSampler`).

    Non-finite logits are never compared: their row chooses as if all logits were zero, and
    is reported as not finite. q is exactly what a draft was drawn from; acceptance relies on it.
    """

    rules: RowRules
    anchor: Int[Array, " B"]
    position: Int[Array, " B"]  # of the anchor
    places: int
    sampled: bool
    vocab_size: int
    min_survival: float = 0.0

    def sample_all(self, logits: Float[Array, "B R N"]) -> DraftChoice:
        """Choose all places at once; q is filtered as the target's p is."""
        finite = all_finite(logits).all(axis=1)
        if not self.sampled:  # one pass over the vocabulary less than comparing zeros
            return DraftChoice(jnp.where(finite[:, None], argmax(logits), 0), None, finite)
        logits = jnp.where(finite[:, None, None], logits, 0.0)

        def drawn() -> tuple[Int[Array, "B R"], Float[Array, "B R N"]]:
            q = sampling.probabilities(logits, self.rules)
            return sampling.draw(self._keys(), q), q

        def best() -> tuple[Int[Array, "B R"], Float[Array, "B R N"]]:
            tokens = argmax(logits)
            return tokens, sampling.one_hot(tokens, logits.shape[-1])

        index, q = jax.lax.cond(sampling.any_sampled(self.rules), drawn, best)
        return DraftChoice(index, q, finite)

    def noise(self, places: int, size: int) -> Float[Array, "B R N"] | None:
        """Return Gumbel noise for choosing place by place, from one key for each row."""
        if not self.sampled:
            return None

        def drawn() -> Float[Array, "B R N"]:
            return sampling.gumbel(self._keys(), (places, size))

        def unused() -> Float[Array, "B R N"]:
            return jnp.zeros((len(self.rules.temperature), places, size), jnp.float32)

        return jax.lax.cond(sampling.any_sampled(self.rules), drawn, unused)

    def sample_one(
        self, logits: Float[Array, "B N"], noise: Float[Array, "B N"] | None
    ) -> DraftChoice:
        """Choose one place: the largest logit, or the largest of logits / temperature + noise."""
        finite = all_finite(logits)
        logits = jnp.where(finite[:, None], logits, 0.0)
        best = argmax(logits)
        if noise is None:
            return DraftChoice(best, None, finite)
        greedy, sure = self.rules.temperature <= 0, sampling.one_hot(best, logits.shape[-1])

        def drawn() -> tuple[Int[Array, " B"], Float[Array, "B N"]]:
            scaled = logits / jnp.where(greedy, 1.0, self.rules.temperature)[:, None]
            q = jnp.where(greedy[:, None], sure, jax.nn.softmax(scaled, axis=-1))
            return jnp.where(greedy, best, argmax(scaled + noise)), q

        index, q = jax.lax.cond(sampling.any_sampled(self.rules), drawn, lambda: (best, sure))
        return DraftChoice(index, q, finite)

    def draft(
        self,
        tokens: Int[Array, "B R"],
        q: Float[Array, "B R N"] | None,
        finite: Bool[Array, " B"],
        *,
        ids: Int[Array, "*places N"] | None = None,
        survival: Float[Array, "B R"] | None = None,
    ) -> Draft:
        """Assemble the chosen tokens into a draft; rows that are not finite get none."""
        drafts = jnp.where(finite[:, None], tokens, 0)
        if q is not None and ids is not None:
            q = over_vocabulary(q, ids, self.vocab_size)
        num_drafts = None
        if survival is not None and self.min_survival > 0:
            num_drafts = (survival >= self.min_survival).sum(axis=1, dtype=jnp.int32)
        block = jnp.concatenate([self.anchor[:, None], drafts], axis=1)
        return Draft(block, q, finite, num_drafts)

    def certain(self, tokens: Int[Array, "B R"], count: Int[Array, " B"] | None = None) -> Draft:
        """Draft given tokens; q has probability 1 for each."""
        q = sampling.one_hot(tokens, self.vocab_size) if self.sampled else None
        drafted = self.draft(tokens, q, jnp.ones(tokens.shape[0], bool))
        return dataclasses.replace(drafted, num_drafts=count)

    def _keys(self) -> Key[Array, " B"]:
        return sampling.row_keys(self.rules, self.position, sampling.DRAFT)


def over_vocabulary(
    q: Float[Array, "B R N"], ids: Int[Array, "*places N"], vocab: int
) -> Float[Array, "B R V"]:
    """Return distributions over the given tokens as distributions over the whole vocabulary."""
    ids = ids.reshape((1,) * (3 - ids.ndim) + ids.shape)
    spread = jax.vmap(jax.vmap(lambda q, at: jnp.zeros((vocab,), q.dtype).at[at].add(q)))
    return spread(q, jnp.broadcast_to(ids, q.shape))
