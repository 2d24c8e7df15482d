"""The Domino drafter: v1 whose later positions are corrected by the tokens drafted before them.

A GRU reads the embeddings of the block's tokens, from the anchor on. Its state and the hidden
state of a position give what is added to the logits there (arXiv 2605.29707; own implementation).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.families.dflash_net import DFlash
from dflash_jax.families.domino import DominoConfig
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
)


class Domino(DFlash):
    """The v1 drafter with the weights of the correction."""

    config: DominoConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        c = self.config
        width = c.hidden_size
        state = c.gru_hidden_dim
        self.gru_input = weight(self, "gru_input", (width, 3 * state))
        self.gru_state = weight(self, "gru_state", (state, 3 * state))
        self.correction_in = weight(self, "correction_in", (width + state, c.emb_dim))
        self.correction_out = weight(self, "correction_out", (c.emb_dim, c.choices))

    def propose(
        self,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Draft each position by the tokens chosen before it."""
        hidden, logits, caches = self.predict(
            caches, anchor, start, shared, sampler.num_drafts, sampler.idle
        )
        embed = self.embed if self.config.own_embedding else shared.embed

        def corrected(
            place: int, token: Int[Array, " B"], state: Float[Array, "B S"]
        ) -> tuple[Float[Array, "B N"], Float[Array, "B S"]]:
            state = self.read(self.scaled(embed(token[:, None])[:, 0]), state)
            if place < self.config.pure_draft_prefix_len:
                return logits[:, place], state
            return logits[:, place] + self.correction(hidden[:, place], state), state

        with jax.named_scope("domino"):
            return self.walk(anchor, logits, sampler, corrected, self.initial(hidden)), caches

    def initial(self, like: Float[Array, "B R D"]) -> Float[Array, "B S"]:
        """Return the state before the anchor."""
        return jnp.zeros((like.shape[0], self.config.gru_hidden_dim), like.dtype)

    def read(self, x: Float[Array, "B D"], state: Float[Array, "B S"]) -> Float[Array, "B S"]:
        """Return the state after one more embedding: PyTorch's GRU without biases."""
        gates = zip(
            jnp.split(dot(x, self.gru_input), 3, axis=-1),
            jnp.split(dot(state, self.gru_state), 3, axis=-1),
            strict=True,
        )
        (reset_x, reset_s), (keep_x, keep_s), (new_x, new_s) = gates
        new = jnp.tanh(new_x + nn.sigmoid(reset_x + reset_s) * new_s)
        return new + nn.sigmoid(keep_x + keep_s) * (state - new)

    def correction(
        self, hidden: Float[Array, "*positions D"], state: Float[Array, "*positions S"]
    ) -> Float[Array, "*positions N"]:
        """Return what is added to the logits."""
        inner = dot(jnp.concatenate([hidden, state], axis=-1), self.correction_in)
        return project(nn.silu(inner), self.correction_out)

    def objective(self, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
        """Score drafts by logits that are corrected after the true tokens.

        The second loss is that of the logits without correction, which the paper weights less and
        less.
        """
        base, p, labels, known = own_vocabulary(self, places, plain, p)
        assert places.embedded is not None
        embedded = self.scaled(places.embedded)
        state = self.initial(places.hidden)
        states = []
        for i in range(base.shape[1]):
            state = self.read(embedded[:, i], state)
            states.append(state)
        added = self.correction(places.hidden, jnp.stack(states, axis=1))
        pure = jnp.arange(base.shape[1]) < self.config.pure_draft_prefix_len
        logits = jnp.where(pure[None, :, None], base, base + added)
        nll = cross_entropy(logits, labels)
        return scores_of(
            known,
            loss=distance(loss, logits, nll, p),
            nll=nll,
            right=is_argmax(logits, labels),
            head=cross_entropy(base, labels),
            head_counts=jnp.ones(nll.shape, bool),
        )


def build(config: DominoConfig) -> Domino:
    """Return the drafter module of a config."""
    return Domino(config)
