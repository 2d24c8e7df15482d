"""The interface between a drafter and the decode step: what it is given and what it returns.

Letters: R drafted places of a block, N tokens that a place chooses from.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Draft:
    """A block for the target to verify.

    In a plain step only the anchor counts: the rest of the block is padding and the other fields
    are None. Where `finite` is False, the drafts are mask tokens and none of them is verified.
    """

    block: Int[Array, "B T"]  # the anchor, then R = T - 1 drafts
    q: Float[Array, "B R V"] | None = None  # what drafts were sampled from; None if greedy
    finite: Bool[Array, " B"] | None = None  # whether all numbers of the drafter were finite
    num_drafts: Int[Array, " B"] | None = None  # leading drafts to verify


@struct.dataclass
class DraftChoice:
    """Chosen drafts, as indices into the last axis of the logits."""

    index: Int[Array, "B *places"]
    q: Float[Array, "B *places N"] | None
    finite: Bool[Array, " B"]


class DraftSampler(Protocol):
    """Chooses drafts by each row's sampling rules; see `decode.drafting.RowDraftSampler`."""

    def sample_all(self, logits: Float[Array, "B R N"]) -> DraftChoice:
        """Choose all places at once, each independently; filters apply as to the target."""
        ...

    def noise(self, places: int, size: int) -> Float[Array, "B R N"] | None:
        """Return the randomness for choosing place by place; None for greedy drafts."""
        ...

    def sample_one(
        self, logits: Float[Array, "B N"], noise: Float[Array, "B N"] | None
    ) -> DraftChoice:
        """Choose one place; q is softmax(logits / temperature)."""
        ...

    def draft(
        self,
        tokens: Int[Array, "B R"],
        q: Float[Array, "B R N"] | None,
        finite: Bool[Array, " B"],
        *,
        ids: Int[Array, "*places N"] | None = None,
        survival: Float[Array, "B R"] | None = None,
    ) -> Draft:
        """Assemble the chosen tokens into a draft.

        Args:
          ids: token of each entry of q; None if it is the index.
          survival: probability that each draft and all before it are accepted.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SharedLayers:
    """The target's embedding and head, as a drafter uses them."""

    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]]
    head: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]
