"""What training objectives of drafter kinds are made of: their inputs, scores and losses.

A kind's module has a method `objective(places, plain, p, loss) -> Scores`, where `plain` are the
target's logits of the drafter's hidden states (these states, if it has a head of its own), and `p`
the target's distributions, or None.

Axes: M blocks, R drafted places of a block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.nn.layers import project

CE_SHARE = 0.1  # share of cross-entropy in the mixed loss; the rest is total variation


@struct.dataclass
class Places:
    """Inputs of the objective for the drafted places of M blocks."""

    hidden: Float[Array, "M R D"]  # hidden states of the drafter
    labels: Int[Array, "M R"]
    previous: Int[Array, "M R"]  # the row's token before each place
    teacher: Float[Array, "M R D"] | None  # the target's hidden state there, for distributions
    embedded: Float[Array, "M R D"] | None = None  # `previous` in the target's table, if asked for


@struct.dataclass
class Scores:
    """Losses and metrics of every place."""

    loss: Float[Array, "M R"]
    nll: Float[Array, "M R"]  # negative log-likelihood of the label
    right: Bool[Array, "M R"]  # whether the label is drafted, given correct earlier drafts
    head: Float[Array, "M R"]  # loss of the selector, the confidence head or the first logits
    head_counts: Bool[Array, "M R"]
    known: Bool[Array, "M R"] | None = None  # whether the label is a token of the drafter; all


def own_vocabulary(
    backbone: Any, places: Places, plain: Array, p: Array | None
) -> tuple[Array, Array | None, Array, Array | None]:
    """Return logits, p and labels in the drafter's vocabulary, and which labels it has.

    Of a reduced one, p is what the target gives to its tokens, and sums to less than 1. None is
    known of a whole one.
    """
    if not backbone.config.own_head:
        return backbone.adjust(plain), p, places.labels, None
    logits = backbone.adjust(project(places.hidden, backbone.head))
    tokens = backbone.tokens()
    index = jnp.minimum(jnp.searchsorted(tokens, places.labels), len(tokens) - 1)
    known = tokens[index] == places.labels
    return logits, None if p is None else p[..., tokens], index, known


def scores_of(
    known: Bool[Array, "M R"] | None,
    *,
    loss: Float[Array, "M R"],
    nll: Float[Array, "M R"],
    right: Bool[Array, "M R"],
    head: Float[Array, "M R"],
    head_counts: Bool[Array, "M R"],
) -> Scores:
    """Return scores in which labels that are not known are never drafted.

    Args:
      known: as in `Scores`, whose fields the other arguments are.
    """
    if known is not None:
        nll = jnp.where(known, nll, jnp.inf)
        right = right & known
    return Scores(loss, nll, right, head, head_counts, known)


def is_argmax(logits: Float[Array, "M R V"], labels: Int[Array, "M R"]) -> Bool[Array, "M R"]:
    """Return whether the label has the largest logit; cheaper than an argmax."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return own >= logits.max(axis=-1)


def distance(loss: str, logits: Array, nll: Array, p: Array | None) -> Array:
    """Return the loss of each place."""
    if loss == "kl":
        assert p is not None
        entropy = (p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))).sum(axis=-1)
        return entropy - (p * jax.nn.log_softmax(logits, axis=-1)).sum(axis=-1)
    if loss == "mix":
        assert p is not None
        return CE_SHARE * nll + (1 - CE_SHARE) * variation(logits, p)
    return nll


def variation(logits: Array, p: Array) -> Array:
    """Return 1 - sum of min(p, q): the probability that a draft from q is rejected."""
    return 1.0 - jnp.minimum(p, jax.nn.softmax(logits, axis=-1)).sum(axis=-1)


def cross_entropy(logits: Float[Array, "M R V"], labels: Int[Array, "M R"]) -> Float[Array, "M R"]:
    """Return the negative log-likelihood of the labels."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - own
