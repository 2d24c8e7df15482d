"""Training objectives of drafters: scores of every trained place, and their weights.

Axes: M blocks, R drafted places of a block. Logits exist for a few blocks at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.nn.layers import project
from dflash_jax.train.recipe import DFLASH, DPACE, DSPARK, KL, MIX, UNIFORM, Recipe

LOGIT_ELEMENTS = 1 << 25  # of one chunk: 128 MiB
CE_SHARE = 0.1  # of the mixed loss; the rest is total variation


@struct.dataclass
class Places:
    """Inputs of the objective for the drafted places of M blocks."""

    hidden: Float[Array, "M R D"]  # of the drafter
    labels: Int[Array, "M R"]
    previous: Int[Array, "M R"]  # the row's token before each place
    teacher: Float[Array, "M R D"] | None  # the target's hidden state there, for distributions


@struct.dataclass
class Scores:
    """Losses and metrics of every place."""

    loss: Float[Array, "M R"]
    nll: Float[Array, "M R"]  # of the label
    right: Bool[Array, "M R"]  # whether the label is drafted, given correct earlier drafts
    head: Float[Array, "M R"]  # loss of the selector or the confidence head
    head_counts: Bool[Array, "M R"]
    known: Bool[Array, "M R"] | None = None  # whether the label is a token of the drafter; all


def scorer(
    drafter: Any, head: Callable[[Array], Array], teacher: Callable[[Array], Array], loss: str
) -> Callable[[dict, Places], Scores]:
    """Return the function (drafter parameters, places) -> scores for this kind of drafter.

    Args:
      head: the target's head without its softcap.
      teacher: the target's head with its softcap.
      loss: ce, kl or mix.
    """
    kinds = {"dflash": _plain, "dflash2": _selected, "dspark": _walked}

    def score(params: dict, places: Places) -> Scores:
        plain = places.hidden if drafter.config.own_head else head(places.hidden)
        p = None if places.teacher is None else jax.nn.softmax(teacher(places.teacher), axis=-1)
        return drafter.apply(
            {"params": params}, places, plain, p, loss, method=kinds[drafter.config.kind]
        )

    return score


def _plain(module: Any, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
    logits, p, labels, known = _own(module, places, plain, p)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return _scores(
        known,
        loss=_distance(loss, logits, nll, p),
        nll=nll,
        right=is_argmax(logits, labels),
        head=jnp.zeros_like(nll),
        head_counts=jnp.zeros(nll.shape, bool),
    )


def _selected(module: Any, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
    """DFlash 2: the selector learns to choose the label among the candidates after the true token.

    Places whose label is not a candidate do not count for the selector.
    """
    logits, p, labels, known = _own(module.backbone, places, plain, p)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    unary, index = jax.lax.top_k(logits, module.config.selector_top_k)
    ids = module.backbone.token(index)
    scores = module.scores(places.hidden, unary, ids, places.previous[:, :, None])[:, :, 0]
    hit = ids == places.labels[:, :, None]
    best = jnp.take_along_axis(ids, jnp.argmax(scores, axis=-1)[:, :, None], axis=-1)[:, :, 0]
    label_score = jnp.where(hit, scores, 0.0).sum(axis=-1)
    return _scores(
        known,
        loss=_distance(loss, logits, nll, p),
        nll=nll,
        right=best == places.labels,
        head=jax.nn.logsumexp(scores, axis=-1) - label_score,
        head_counts=hit.any(axis=-1),
    )


def _walked(module: Any, places: Places, plain: Array, p: Array | None, loss: str) -> Scores:
    """DSpark: the Markov head is given the true previous token; the confidence head learns the
    overlap of p with the drafter's distribution.
    """
    base, p, labels, known = _own(module.backbone, places, plain, p)
    c, read, logits = module.config, [places.hidden], base
    if c.markov_rank:
        rows = module.w1[places.previous]  # [M, R, r]
        state = jnp.zeros((base.shape[0], c.markov_rank), rows.dtype)
        added = []
        for i in range(base.shape[1]):
            bias, state = module.bias(places.hidden[:, i], rows[:, i], state)
            added.append(bias)
        read, logits = [*read, rows], base + jnp.stack(added, axis=1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    head, counts = jnp.zeros_like(nll), jnp.zeros(nll.shape, bool)
    if c.confidence_head and p is not None:
        covered = jax.lax.stop_gradient(1.0 - _variation(logits, p))
        trust = module.trust(jnp.concatenate(read, axis=-1))
        head, counts = optax.sigmoid_binary_cross_entropy(trust, covered), ~counts
    return _scores(
        known,
        loss=_distance(loss, logits, nll, p),
        nll=nll,
        right=is_argmax(logits, labels),
        head=head,
        head_counts=counts,
    )


def _own(
    backbone: Any, places: Places, plain: Array, p: Array | None
) -> tuple[Array, Array | None, Array, Array | None]:
    """Return logits, p and labels in the drafter's vocabulary, and which labels it has.

    Of a reduced one, p is what the target gives to its tokens, and sums to less than 1. None is
    known of a whole one.
    """
    if not backbone.config.own_head:
        return backbone.adjust(plain), p, places.labels, None
    logits, tokens = backbone.adjust(project(places.hidden, backbone.head)), backbone.tokens()
    index = jnp.minimum(jnp.searchsorted(tokens, places.labels), len(tokens) - 1)
    known = tokens[index] == places.labels
    return logits, None if p is None else p[..., tokens], index, known


def _scores(known: Array | None, **found: Array) -> Scores:
    """Return scores in which labels that are not known are never drafted."""
    if known is None:
        return Scores(**found)
    nll, right = jnp.where(known, found["nll"], jnp.inf), found["right"] & known
    return Scores(**found | {"nll": nll, "right": right}, known=known)


def is_argmax(logits: Float[Array, "M R V"], labels: Int[Array, "M R"]) -> Bool[Array, "M R"]:
    """Return whether the label has the largest logit; cheaper than an argmax."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return own >= logits.max(axis=-1)


def _distance(loss: str, logits: Array, nll: Array, p: Array | None) -> Array:
    """Return the loss of each place."""
    if loss == KL:
        assert p is not None
        entropy = (p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))).sum(axis=-1)
        return entropy - (p * jax.nn.log_softmax(logits, axis=-1)).sum(axis=-1)
    if loss == MIX:
        assert p is not None
        return CE_SHARE * nll + (1 - CE_SHARE) * _variation(logits, p)
    return nll


def _variation(logits: Array, p: Array) -> Array:
    """Return 1 - sum of min(p, q): the probability that a draft from q is rejected."""
    return 1.0 - jnp.minimum(p, jax.nn.softmax(logits, axis=-1)).sum(axis=-1)


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
    recipe: Recipe, nll: Float[Array, "B N R"], counts: Bool[Array, "B N R"]
) -> Float[Array, "B N R"]:
    """Return the weight of every place, 0 where it does not count; carries no gradient."""
    if recipe.weights == UNIFORM:
        return counts.astype(jnp.float32)
    if recipe.weights == DPACE:
        return jnp.where(counts, pace(nll, counts, recipe.smoothing), 0.0)
    return jnp.where(counts, decay_weights(counts.shape[2], recipe.decay)[None, None], 0.0)


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

    loss: Float[Array, ""]  # of weighted places
    weight: Float[Array, ""]
    head: Float[Array, ""]
    head_weight: Float[Array, ""]
    right: Float[Array, ""]  # right drafts
    places: Float[Array, ""]  # places that count
    run: Float[Array, ""]  # leading right drafts of blocks whose places all count
    blocks: Float[Array, ""]


def sums(recipe: Recipe, scores: Scores, counts: Bool[Array, "B N R"]) -> Sums:
    """Return the sums of scores over places."""
    weights = place_weights(recipe, scores.nll, counts)
    if scores.known is not None:
        weights = jnp.where(scores.known, weights, 0.0)
    heads = jnp.where(scores.head_counts, weights, 0.0)
    right = (scores.right & counts).astype(jnp.float32)
    whole = counts.all(axis=2).astype(jnp.float32)
    return Sums(
        loss=(scores.loss * weights).sum(),
        weight=weights.sum(),
        head=(scores.head * heads).sum(),
        head_weight=heads.sum(),
        right=right.sum(),
        places=counts.sum().astype(jnp.float32),
        run=(jnp.cumprod(right, axis=2).sum(axis=2) * whole).sum(),
        blocks=whole.sum(),
    )


def total(recipe: Recipe, totals: Sums) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the loss of a batch, its sums divided once, and the logged metrics.

    `simulated` is the acceptance length over blocks whose places all count: 1 plus the number of
    leading right drafts.
    """
    loss = totals.loss / divisor(totals.weight)
    logged = {
        "simulated": 1.0 + totals.run / divisor(totals.blocks),
        "accuracy": totals.right / divisor(totals.places),
        "places": totals.places,
    }
    if recipe.kind != DFLASH:
        logged["head"] = totals.head / divisor(totals.head_weight)
        loss += recipe.head_weight * logged["head"]
    return loss, {"loss": loss, **logged}


def divisor(weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return the divisor of a weighted sum, 1 where the total weight is 0."""
    return jnp.where(weight > 0, weight, 1.0)


def wants_distribution(recipe: Recipe) -> bool:
    """Return whether the recipe needs the target's final hidden states."""
    confident = recipe.kind == DSPARK and recipe.confidence_head
    return confident or recipe.loss in (KL, MIX)
