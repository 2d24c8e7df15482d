"""Draft one block: the drafter's forward pass, then a choice of tokens by each row's rules."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    return Draft(block, finite, jnp.where(finite, count, 0).astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class RowDraftSampler:
    """Chooses drafts by each row's sampling rules (a `protocols.DraftSampler`).

    Non-finite logits are never compared: their row chooses as if all logits were zero, and
    is reported as not finite.
    """

    rules: RowRules
    anchor: Int[Array, " B"]
    position: Int[Array, " B"]  # of the anchor
    places: int
    sampled: bool
    vocab_size: int
    min_survival: float = 0.0

    def sample_all(
        self, logits: Float[Array, "B R N"], ids: Int[Array, " N"] | None = None
    ) -> DraftChoice:
        """Choose all places at once, each as the target would by these logits."""
        finite = all_finite(logits).all(axis=1)
        if not self.sampled:  # one pass over the vocabulary less than comparing zeros
            return DraftChoice(jnp.where(finite[:, None], argmax(logits), 0), finite)
        logits = jnp.where(finite[:, None, None], logits, 0.0)

        def drawn() -> Int[Array, "B R"]:
            def one(place: tuple[Float[Array, "B N"], Int[Array, ""]]) -> Int[Array, " B"]:
                logits, i = place
                return argmax(sampling.scaled(logits, self.rules) + self._noise(i, ids))

            places = logits.swapaxes(0, 1), jnp.arange(logits.shape[1])
            return jax.lax.map(one, places).T

        index = jax.lax.cond(sampling.any_sampled(self.rules), drawn, lambda: argmax(logits))
        return DraftChoice(index, finite)

    def noise(self, ids: Int[Array, "*places N"] | None = None) -> Float[Array, "B R N"] | None:
        """Return the noise of choosing place by place; None for greedy drafts."""
        if not self.sampled:
            return None
        size = self.vocab_size if ids is None else ids.shape[-1]

        def drawn() -> Float[Array, "B R N"]:
            places = jnp.arange(self.places)
            if ids is None or ids.ndim == 1:
                found = jax.lax.map(lambda i: self._noise(i, ids), places)
            else:
                found = jax.lax.map(lambda of: self._noise(*of), (places, ids.swapaxes(0, 1)))
            return found.swapaxes(0, 1)

        def unused() -> Float[Array, "B R N"]:
            return jnp.zeros((len(self.rules.temperature), self.places, size), jnp.float32)

        return jax.lax.cond(sampling.any_sampled(self.rules), drawn, unused)

    def sample_one(
        self, logits: Float[Array, "B N"], noise: Float[Array, "B N"] | None
    ) -> DraftChoice:
        """Choose one place: the largest logit, or the largest of logits / temperature + noise."""
        finite = all_finite(logits)
        logits = jnp.where(finite[:, None], logits, 0.0)
        if noise is None:
            return DraftChoice(argmax(logits), finite)
        heat = jnp.where(self.rules.temperature > 0, self.rules.temperature, 1.0)
        return DraftChoice(argmax(logits / heat[:, None] + noise), finite)

    def draft(
        self,
        tokens: Int[Array, "B R"],
        finite: Bool[Array, " B"],
        *,
        survival: Float[Array, "B R"] | None = None,
    ) -> Draft:
        """Assemble the chosen tokens into a draft; rows that are not finite get none."""
        drafts = jnp.where(finite[:, None], tokens, 0)
        num_drafts = None
        if survival is not None and self.min_survival > 0:
            num_drafts = (survival >= self.min_survival).sum(axis=1, dtype=jnp.int32)
        block = jnp.concatenate([self.anchor[:, None], drafts], axis=1)
        return Draft(block, finite, num_drafts)

    def certain(self, tokens: Int[Array, "B R"], count: Int[Array, " B"] | None = None) -> Draft:
        """Draft given tokens."""
        drafted = self.draft(tokens, jnp.ones(tokens.shape[0], bool))
        return dataclasses.replace(drafted, num_drafts=count)

    def _noise(
        self, place: Int[Array, ""], ids: Int[Array, "*rows N"] | None
    ) -> Float[Array, "B N"]:
        """Return the noise by which the target will choose the token of a place; 0 if greedy."""
        keys = sampling.row_keys(self.rules, self.position + 1 + place, sampling.TOKEN)
        noise = sampling.gumbel(keys, self.vocab_size)
        noise = jnp.where(self.rules.temperature[:, None] > 0, noise, 0.0)
        if ids is None:
            return noise
        return jnp.take_along_axis(noise, jnp.broadcast_to(ids, (len(noise), ids.shape[-1])), 1)
