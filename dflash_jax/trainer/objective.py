"""Training objectives of drafters: scores of every trained place, and their weights.

Axes: M blocks, R drafted places of a block. Logits exist for a few blocks at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float

from dflash_jax.errors import ConfigError
from dflash_jax.families import drafter_kinds
from dflash_jax.nn.objective import Places, Scores
from dflash_jax.trainer.recipes import AUF, DPACE, KL, MIX, UNIFORM, VAT, Recipe

LOGIT_ELEMENTS = 1 << 25  # logits of one chunk: 128 MiB


def scorer(
    drafter: Any, head: Callable[[Array], Array], teacher: Callable[[Array], Array], loss: str
) -> Callable[[dict, Places], Scores]:
    """Return the function (drafter parameters, places) -> scores for this kind of drafter.

    Args:
      head: the target's head without its softcap.
      teacher: the target's head with its softcap.
      loss: ce, kl or mix.

    Raises:
      ConfigError: the kind has no objective.
    """
    if not hasattr(drafter, "objective"):
        raise ConfigError(f"{type(drafter).__name__} has no method `objective`; it is not trained")

    def score(params: dict, places: Places) -> Scores:
        plain = places.hidden if drafter.config.own_head else head(places.hidden)
        p = None if places.teacher is None else jax.nn.softmax(teacher(places.teacher), axis=-1)
        return drafter.apply({"params": params}, places, plain, p, loss, method="objective")

    return score


def in_chunks(
    score: Callable[[dict, Places], Scores], params: dict, places: Places, vocabulary: int
) -> Scores:
    """Return the scores of blocks [B, N, R, ...], computed in chunks of blocks.

    Chunks keep the logits below `LOGIT_ELEMENTS` and are recomputed in the backward pass.
    """
    rows, count, width = places.labels.shape
    parts = fewest_parts(count, rows * count * width * vocabulary, LOGIT_ELEMENTS)
    size = count // parts

    def cut(x: Array) -> Array:
        x = x.reshape(rows, parts, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(parts, rows * size, *x.shape[3:])

    def joined(x: Array) -> Array:
        x = x.reshape(parts, rows, size, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1).reshape(rows, count, *x.shape[3:])

    chunks = jax.tree.map(cut, places)
    if parts == 1:
        results = jax.tree.map(
            lambda x: x[None], score(params, jax.tree.map(lambda x: x[0], chunks))
        )
    else:
        again = jax.checkpoint(score)
        results = jax.lax.map(lambda chunk: again(params, chunk), chunks)
    return jax.tree.map(joined, results)


def fewest_parts(count: int, elements: int, limit: int) -> int:
    """Return the smallest divisor of `count` that brings `elements` below `limit`."""
    parts = (n for n in range(1, count + 1) if count % n == 0)
    return next((n for n in parts if elements <= limit * n), count)


def place_weights(
    recipe: Recipe,
    nll: Float[Array, "B N R"],
    right: Bool[Array, "B N R"],
    counts: Bool[Array, "B N R"],
) -> Float[Array, "B N R"]:
    """Return the weight of every place, 0 where it does not count; carries no gradient.

    Args:
      right: whether the label is drafted.
    """
    if recipe.weights in (AUF, VAT):
        past = places_after_rejection(right)
        kept = jnp.exp(-past / recipe.decay) if recipe.weights == VAT else past == 0
        return jnp.where(counts, kept.astype(jnp.float32), 0.0)
    if recipe.weights == UNIFORM:
        return counts.astype(jnp.float32)
    if recipe.weights == DPACE:
        return jnp.where(counts, pace(nll, counts, recipe.smoothing), 0.0)
    return jnp.where(counts, decay_weights(counts.shape[2], recipe.decay)[None, None], 0.0)


def places_after_rejection(right: Bool[Array, "B N R"]) -> Float[Array, "B N R"]:
    """Return how many places each one is after the first wrong draft; 0 up to that one.

    Decoding keeps the drafts before it and learns the token there, and never looks at later ones
    (arXiv 2607.01893, 2608.30135).
    """
    drafted = jnp.cumprod(right.astype(jnp.float32), axis=2)
    return jnp.maximum(jnp.cumsum(1.0 - drafted, axis=2) - 1.0, 0.0)


def decay_weights(places: int, decay: float) -> Float[Array, " R"]:
    """Return exp(-k/decay) for places k = 0 .. R-1 (DFlash, eq. 4)."""
    return jnp.exp(-jnp.arange(places, dtype=jnp.float32) / decay)


def pace(
    nll: Float[Array, "B N R"], counts: Bool[Array, "B N R"], smoothing: float
) -> Float[Array, "B N R"]:
    """Return the D-PACE weights (arXiv 2605.18810).

    With c = (1 - a) q + a the smoothed probability of a label, the weight of place j is the sum
    over m >= j of the product of c up to m: the expected number of later tokens that are reached.
    """
    chance = (1 - smoothing) * jnp.exp(-jax.lax.stop_gradient(nll)) + smoothing
    reached = jnp.cumprod(jnp.where(counts, chance, 1.0), axis=2)
    reached = jnp.where(counts, reached, 0.0)
    return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=2), axis=2), axis=2)


@struct.dataclass
class Sums:
    """Sums of a batch, or of a part of one, that make its loss and metrics."""

    loss: Float[Array, ""]  # losses of places times their weights
    weight: Float[Array, ""]
    head: Float[Array, ""]
    head_weight: Float[Array, ""]
    right: Float[Array, ""]  # right drafts
    places: Float[Array, ""]  # places that count
    run: Float[Array, ""]  # leading right drafts of blocks at random, whose places all count
    blocks: Float[Array, ""]
    chained_run: Float[Array, ""]  # the same of blocks where decoding would draft
    chained_blocks: Float[Array, ""]


def sums(
    recipe: Recipe, scores: Scores, counts: Bool[Array, "B N R"], chained: Sequence[int] = ()
) -> Sums:
    """Return the sums of scores over places.

    Args:
      chained: blocks of a row that start where decoding would draft; the others are at random.
    """
    weights = place_weights(recipe, scores.nll, scores.right, counts)
    if scores.known is not None:
        weights = jnp.where(scores.known, weights, 0.0)
    heads = jnp.where(scores.head_counts, weights, 0.0)
    right = (scores.right & counts).astype(jnp.float32)
    whole = counts.all(axis=2).astype(jnp.float32)
    run = jnp.cumprod(right, axis=2).sum(axis=2) * whole
    moved = np.isin(np.arange(counts.shape[1]), chained)[None]
    return Sums(
        loss=(scores.loss * weights).sum(),
        weight=weights.sum(),
        head=(scores.head * heads).sum(),
        head_weight=heads.sum(),
        right=right.sum(),
        places=counts.sum().astype(jnp.float32),
        run=jnp.where(moved, 0.0, run).sum(),
        blocks=jnp.where(moved, 0.0, whole).sum(),
        chained_run=jnp.where(moved, run, 0.0).sum(),
        chained_blocks=jnp.where(moved, whole, 0.0).sum(),
    )


def total(recipe: Recipe, totals: Sums) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the loss of a batch, its sums divided once, and the logged metrics.

    `simulated` is the acceptance length over blocks whose places all count: 1 plus the number of
    leading right drafts. `simulated_chained` is that of blocks where decoding would draft.
    """
    loss = totals.loss / divisor(totals.weight)
    logged = {
        "simulated": 1.0 + totals.run / divisor(totals.blocks),
        "accuracy": totals.right / divisor(totals.places),
        "places": totals.places,
    }
    if recipe.chained:
        logged["simulated_chained"] = 1.0 + totals.chained_run / divisor(totals.chained_blocks)
    if drafter_kinds()[recipe.kind].second_loss:
        logged["head"] = totals.head / divisor(totals.head_weight)
        loss += recipe.head_weight * logged["head"]
    return loss, {"loss": loss, **logged}


def divisor(weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return the divisor of a weighted sum, 1 where the total weight is 0."""
    return jnp.where(weight > 0, weight, 1.0)


def wants_distribution(recipe: Recipe) -> bool:
    """Return whether the recipe needs the target's final hidden states."""
    return recipe.loss in (KL, MIX) or drafter_kinds()[recipe.kind].wants_distribution(recipe)
