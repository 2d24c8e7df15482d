"""The DSpark drafter: v1 shifted by one position, with a Markov and a confidence head.

Position k predicts the token after it, starting with the anchor. The Markov head corrects its
logits by the token chosen just before; the confidence head predicts, before a draft is sampled,
how likely it is to be accepted (arXiv 2607.05147; own implementation).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.families.dflash_net import DFlash
from dflash_jax.families.dspark import DSparkConfig
from dflash_jax.graph.protocols import Draft, DraftSampler, SharedLayers
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.nn.layers import dot, project, weight
from dflash_jax.nn.objective import (
    Places,
    Scores,
    cross_entropy,
    distance,
    is_argmax,
    own_vocabulary,
    scores_of,
    variation,
)


class DSpark(DFlash):
    """The v1 drafter with the weights of both heads."""

    config: DSparkConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        c = self.config
        rank = c.markov_rank
        width = c.hidden_size
        if rank:
            self.w1 = weight(self, "markov_w1", (c.vocab_size, rank), 1.0)
            self.w2 = weight(self, "markov_w2", (rank, c.choices))
        if rank and c.markov_head == "gated":
            self.gate = weight(self, "markov_gate", (width + rank, rank))
            self.gate_bias = weight(self, "markov_gate_bias", (rank,))
        if rank and c.markov_head == "rnn":
            self.joint = weight(self, "markov_joint", (2 * rank + width, 3 * rank))
            self.joint_bias = weight(self, "markov_joint_bias", (3 * rank,))
        if c.confidence_head:
            read = width + rank if c.confidence_with_markov else width
            self.confidence = weight(self, "confidence", (read, 1))
            self.confidence_bias = weight(self, "confidence_bias", (1,))

    def propose(
        self,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Draft each position by the token chosen before it."""
        hidden, logits, caches = self.predict(
            caches, anchor, start, shared, sampler.num_drafts, sampler.idle
        )
        if self.config.markov_rank:
            with jax.named_scope("markov"):
                return self._by_markov(anchor, hidden, logits, sampler), caches
        ids = self.tokens()
        choice = sampler.sample_all(logits, ids)
        confidence = self._confidence([hidden[:, i] for i in range(hidden.shape[1])])
        drafted = sampler.draft(
            self.token(choice.index),
            choice.finite,
            confidence=confidence,
            logits=logits,
            ids=ids,
        )
        return drafted, caches

    def _by_markov(
        self,
        anchor: Int[Array, " B"],
        hidden: Float[Array, "B R D"],
        logits: Float[Array, "B R N"],
        sampler: DraftSampler,
    ) -> Draft:
        read = []  # by the confidence head

        def corrected(
            place: int, token: Int[Array, " B"], state: Float[Array, "B r"]
        ) -> tuple[Float[Array, "B N"], Float[Array, "B r"]]:
            previous = self.w1[token]  # [B, r]
            bias, state = self.bias(hidden[:, place], previous, state)
            read.append(jnp.concatenate([hidden[:, place], previous], axis=-1))
            return logits[:, place] + bias, state

        state = jnp.zeros((anchor.shape[0], self.config.markov_rank), hidden.dtype)
        return self.walk(anchor, logits, sampler, corrected, state, lambda: self._confidence(read))

    def bias(
        self,
        hidden: Float[Array, "B D"],
        previous: Float[Array, "B r"],
        state: Float[Array, "B r"],
    ) -> tuple[Float[Array, "B N"], Float[Array, "B r"]]:
        """Return the correction by the previous token, and the recurrent head's new state.

        Inputs are concatenated in a different order in each variant: gated [h ; e],
        rnn [s ; e ; h].
        """
        kind = self.config.markov_head
        if kind == "vanilla":
            return project(previous, self.w2), state
        if kind == "gated":
            joined = jnp.concatenate([hidden, previous], axis=-1)
            gate = nn.sigmoid(dot(joined, self.gate) + self.gate_bias[None])
            return project(gate * previous, self.w2), state
        joined = jnp.concatenate([state, previous, hidden], axis=-1)
        update = dot(joined, self.joint) + self.joint_bias[None]
        keep, new, out = jnp.split(update, 3, axis=-1)
        keep = nn.sigmoid(keep)
        state = keep * state + (1 - keep) * jnp.tanh(new)
        return project(jnp.tanh(out), self.w2), state

    def _confidence(self, read: list[Float[Array, "B E"]]) -> Float[Array, "B R"] | None:
        """Return the probability that each draft and all before it are accepted."""
        if not self.config.confidence_head:
            return None
        return jnp.cumprod(nn.sigmoid(self.trust(jnp.stack(read, axis=1))), axis=1)

    def trust(self, read: Float[Array, "B R E"]) -> Float[Array, "B R"]:
        """Return the logit of accepting each draft, given that all before it are accepted.

        Args:
          read: hidden states, and the previous tokens' Markov rows if there are any.
        """
        c = self.config
        inputs = read if c.confidence_with_markov else read[:, :, : c.hidden_size]
        bias = self.confidence_bias.astype(jnp.float32)[None, None]
        return (project(inputs, self.confidence) + bias)[:, :, 0]

    def objective(self, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
        """Score drafts after the true previous tokens, which the Markov head reads.

        The confidence head learns the overlap of p with the drafter's distribution.
        """
        base, p, labels, known = own_vocabulary(self, places, plain, p)
        c = self.config
        read = [places.hidden]
        logits = base
        if c.markov_rank:
            rows = self.w1[places.previous]  # [M, R, r]
            state = jnp.zeros((base.shape[0], c.markov_rank), rows.dtype)
            added = []
            for i in range(base.shape[1]):
                bias, state = self.bias(places.hidden[:, i], rows[:, i], state)
                added.append(bias)
            read = [*read, rows]
            logits = base + jnp.stack(added, axis=1)
        nll = cross_entropy(logits, labels)
        head = jnp.zeros_like(nll)
        counts = jnp.zeros(nll.shape, bool)
        if c.confidence_head and p is not None:
            covered = jax.lax.stop_gradient(1.0 - variation(logits, p))
            # Its gradient would change what the drafts are made of.
            trust = self.trust(jax.lax.stop_gradient(jnp.concatenate(read, axis=-1)))
            accepted = covered * nn.log_sigmoid(trust)
            rejected = (1 - covered) * nn.log_sigmoid(-trust)
            head = -(accepted + rejected)
            counts = ~counts
        return scores_of(
            known,
            loss=distance(loss, logits, nll, p),
            nll=nll,
            right=is_argmax(logits, labels),
            head=head,
            head_counts=counts,
        )


def build(config: DSparkConfig) -> DSpark:
    """Return the drafter module of a config."""
    return DSpark(config)
