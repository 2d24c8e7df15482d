"""What a drafter is given to draft a block, and what it answers.

Letters: R drafted places of a step, N tokens a place chooses from.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.state import LayerCache


@struct.dataclass
class Proposal:
    """A drafted block."""

    tokens: Int[Array, "B R"]
    q: Float[Array, "B R N"] | None  # what each token was drawn from; None if the best was taken
    ids: Int[Array, "*places N"] | None  # token of each entry of q; None: its index
    finite: Bool[Array, " B"]  # every number the choice hung on
    caches: tuple[LayerCache, ...]
    survival: Float[Array, "B R"] | None = None  # chance that place and all before it are kept

    def q_over(self, vocab: int) -> Float[Array, "B R V"] | None:
        """q as a distribution over the target's whole vocabulary."""
        if self.q is None or self.ids is None:
            return self.q
        ids = self.ids.reshape((1,) * (3 - self.ids.ndim) + self.ids.shape)
        spread = jax.vmap(jax.vmap(lambda q, at: jnp.zeros((vocab,), q.dtype).at[at].add(q)))
        return spread(self.q, jnp.broadcast_to(ids, self.q.shape))


@struct.dataclass
class Choice:
    """What was chosen, as indices into the last axis of the scores."""

    index: Int[Array, "B *places"]
    q: Float[Array, "B *places N"] | None
    finite: Bool[Array, " B"]


class Chooser(Protocol):
    """Chooses by a request's rules; see `decode.sampling.Drafting`."""

    def every(self, logits: Float[Array, "B R N"]) -> Choice:
        """All places at once, none knowing of the others; q is filtered as the target's p is."""
        ...

    def noise(self, places: int, size: int) -> Float[Array, "B R N"] | None:
        """The randomness of a walk over places of `size` scores; None where none is needed."""
        ...

    def one(self, scores: Float[Array, "B N"], noise: Float[Array, "B N"] | None) -> Choice:
        """One place of a walk; q is softmax(scores / temperature)."""
        ...


@dataclasses.dataclass(frozen=True)
class Lender:
    """What a drafter borrows from its target."""

    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]]
    head: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]
