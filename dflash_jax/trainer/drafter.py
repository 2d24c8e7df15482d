"""Training of drafters with the engine's own modules, on many anchored blocks at once."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.families import drafter_kinds
from dflash_jax.graph.abstract import cast_params
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.nn.layers import rms_norm
from dflash_jax.trainer import blocks as anchoring
from dflash_jax.trainer import objective, own_modules
from dflash_jax.trainer.blocks import split_attention
from dflash_jax.trainer.features import TargetFeatures, target_features
from dflash_jax.trainer.recipes import DFLASH, Recipe
from dflash_jax.trainer.target import TrainState

FIXED = "drafter"  # key of the drafter's parameters among the frozen ones


def anchored(
    module: Any,
    taps: Sequence[Float[Array, "B S D"]],
    blocks: Float[Array, "B N T D"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N T D"]:
    """Return hidden states of N blocks, equal to those of the cached call at each anchor.

    Args:
      module: a drafter of any kind.
      taps: the target's hidden states of the whole row.
      blocks: target embeddings of [anchor, mask, mask, ...].
    """
    backbone = getattr(module, "backbone", module)
    c = backbone.config
    rows, count, width, depth = blocks.shape
    context = backbone.fuse(taps)
    places = jnp.broadcast_to(jnp.arange(context.shape[1])[None, :], context.shape[:2])
    positions = anchors[:, :, None] + jnp.arange(width)[None, None, :]
    positions = positions.reshape(rows * count, width)

    def by_row(y: Array) -> Array:
        return y.reshape(rows, count, *y.shape[1:])

    x = backbone.scaled(blocks.reshape(rows * count, width, depth))
    for layer, window, causal in zip(backbone.layers, c.windows, c.causal, strict=True):

        def attend(h: Array, layer: Any = layer, window=window, causal=causal) -> tuple:
            attention = layer.attention
            keys, values = attention.keys_values(h, positions)
            heads = split_attention(
                by_row(attention.queries(h, positions)),
                attention.keys_values(context, places),
                (by_row(keys), by_row(values)),
                anchors,
                causal=causal,
                window=window,
            )
            return attention.output(heads.reshape(rows * count, width, -1)), None

        x, _ = layer.around(x, attend)
    return by_row(rms_norm(x, backbone.norm, c.rms_norm_eps, backbone.kernels))


@struct.dataclass
class Blocks:
    """Anchors of a batch, the labels of their drafted places, and which places count."""

    anchors: Int[Array, "B N"]
    labels: Int[Array, "B N R"]
    counts: Bool[Array, "B N R"]


def draft_hidden(
    pair: Pair,
    params: dict[str, Any],
    features: TargetFeatures,
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N R D"]:
    """Return the drafter's hidden states at the predicted places of blocks at `anchors`.

    Args:
      params: "target" and "drafter".
    """
    assert pair.drafter is not None
    config = pair.drafter.config
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    masks = (*first.shape, config.block_size - 1)
    block = jnp.concatenate(
        [first[:, :, None], jnp.full(masks, config.mask_token_id, first.dtype)], axis=2
    )
    flat = block.reshape(block.shape[0], -1)
    x = pair.target_call(params, flat, method="embed").reshape(*block.shape, -1)
    kind = _float_dtype(params["drafter"])
    taps = tuple(tap.astype(kind) for tap in features.taps)
    hidden = pair.drafter_call(params, taps, x.astype(kind), anchors, method=anchored)
    return hidden if config.sample_from_anchor else hidden[:, :, 1:]


def _float_dtype(params: dict[str, Any]) -> Any:
    """Return the dtype of the weights; the table of a reduced vocabulary has integers."""
    return next(x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating))


def scores(
    pair: Pair,
    params: dict[str, Any],
    recipe: Recipe,
    features: TargetFeatures,
    tokens: Int[Array, "B S"],
    blocks: Blocks,
) -> objective.Scores:
    """Return the scores [B, N, R] of all drafted places."""
    assert pair.drafter is not None
    if own_modules.is_own(pair.drafter):
        places = (blocks.anchors, blocks.labels, blocks.counts)
        return own_modules.scores(pair, params, recipe, features, tokens, places)
    length = tokens.shape[1]
    count = blocks.labels.shape[2]
    before = anchoring.slots(blocks.anchors, count, length)  # the place before each drafted one
    teacher = None
    if features.hidden is not None:
        flat = before.reshape(len(tokens), -1, 1)
        teacher = jnp.take_along_axis(features.hidden, flat, axis=1).reshape(*before.shape, -1)
    previous = anchoring.gather(tokens, before)
    embedded = None
    if drafter_kinds()[recipe.kind].reads_embeddings:
        flat = pair.target_call(params, previous.reshape(len(tokens), -1), method="embed")
        embedded = flat.reshape(*previous.shape, -1).astype(_float_dtype(params["drafter"]))
    places = objective.Places(
        hidden=draft_hidden(pair, params, features, tokens, blocks.anchors),
        labels=blocks.labels,
        previous=previous,
        teacher=teacher,
        embedded=embedded,
    )
    score = objective.scorer(
        pair.drafter,
        pair.shared(params).head,
        lambda x: pair.target_call(params, x, method="logits"),
        recipe.loss,
    )
    return objective.in_chunks(score, params["drafter"], places, pair.drafter.config.choices)


def chained(
    pair: Pair,
    params: dict[str, Any],
    recipe: Recipe,
    features: TargetFeatures,
    part: "BatchPart",
    moved: np.ndarray,
) -> "BatchPart":
    """Return the rows with the anchors `moved` where decoding would draft after them.

    No gradient flows through the drafts that decide it. A row counts as what decoding commits, also
    where it was sampled: a draft is accepted if it is the row's token.
    """
    assert pair.drafter is not None
    anchors = part.anchors[:, moved]
    alive = part.alive[:, moved]
    width = step_width(pair, recipe)
    labels, counts = anchoring.following(part.tokens, part.wanted, anchors, width)
    blocks = Blocks(anchors=anchors, labels=labels, counts=counts)
    fixed = jax.lax.stop_gradient(params)
    right = scores(pair, fixed, recipe, features, part.tokens, blocks).right
    anchors, alive = anchoring.after_round(anchors, alive, right & counts, part.wanted)
    return part.replace(  # pyrefly: ignore
        anchors=part.anchors.at[:, moved].set(anchors), alive=part.alive.at[:, moved].set(alive)
    )


def step_width(pair: Pair, recipe: Recipe) -> int:
    """Return the tokens of a step that verifies all drafts of the drafter."""
    own = own_modules.is_own(pair.drafter)
    return recipe.block if own else pair.drafter.config.step_width


def joined(trained: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return all parameters of a drafter, of which some are trained and the others are not."""
    if not fixed:
        return trained
    both = {name: joined(trained[name], fixed[name]) for name in trained.keys() & fixed.keys()}
    return trained | fixed | both


@struct.dataclass
class BatchPart:
    """Rows of a batch, with the target's features where they are precomputed."""

    tokens: Int[Array, "B S"]
    wanted: Bool[Array, "B S"]
    anchors: Int[Array, "B N"]
    alive: Bool[Array, "B N"]
    features: TargetFeatures | None


def sums(
    pair: Pair, recipe: Recipe, params: dict[str, Any], frozen: dict[str, Any], part: BatchPart
) -> objective.Sums:
    """Return the sums that these rows add to the loss and the metrics of a batch.

    Args:
      params: parameters of the drafter.
      frozen: parameters of the target, and those of the drafter that are not trained in `FIXED`.
    """
    assert pair.drafter is not None
    features = part.features
    if features is None:
        keep = objective.wants_distribution(recipe)
        features = target_features(pair, frozen, part.tokens, dtype=recipe.dtype, keep=keep)
    if features.hidden is not None:
        features = features.replace(hidden=features.hidden.astype(recipe.dtype))  # pyrefly: ignore
    drafter = cast_params(joined(params, frozen.get(FIXED, {})), recipe.training_dtype)
    both = {"target": frozen, "drafter": drafter}
    moved = anchoring.chained_share(part.anchors.shape[1], recipe.chained)
    if len(moved):
        part = chained(pair, both, recipe, features, part, moved)
    width = step_width(pair, recipe)
    labels, counts = anchoring.trained(
        part.tokens, part.wanted, features.best, part.anchors, part.alive, width
    )
    blocks = Blocks(anchors=part.anchors, labels=labels, counts=counts)
    place_scores = scores(pair, both, recipe, features, part.tokens, blocks)
    return objective.sums(recipe, place_scores, counts, moved.tolist())


def gradient(
    pair: Pair,
    recipe: Recipe,
    params: dict,
    frozen: dict,
    rows: tuple[Array, Array],
    features: TargetFeatures | None,
    number: Array,
    count: int,
) -> tuple[dict, dict[str, Array]]:
    """Return gradient and metrics of one batch, accumulated over `recipe.parts` parts.

    Args:
      frozen: see `sums`.
      rows: tokens and the mask of wanted tokens.
      features: the target's features of the rows; None computes them here.
      number: step number, which seeds the anchors together with the recipe's seed.
      count: anchors per row.
    """
    key = jax.random.fold_in(jax.random.key(recipe.seed), number)
    anchors, alive = anchoring.sample(key, anchoring.startable(rows[1]), count)
    whole = BatchPart(rows[0].astype(jnp.int32), rows[1], anchors, alive, features)
    if recipe.parts == 1:

        def loss(params: dict) -> tuple[Array, dict[str, Array]]:
            return objective.total(recipe, sums(pair, recipe, params, frozen, whole))

        return jax.grad(loss, has_aux=True)(params)

    def added(params: dict, part: BatchPart) -> tuple[Array, objective.Sums]:
        totals = sums(pair, recipe, params, frozen, part)
        return jnp.stack([totals.loss, totals.head]), totals

    def one(carry: Any, part: BatchPart) -> tuple[Any, None]:
        _, pull, totals = jax.vjp(lambda p: added(p, part), params, has_aux=True)
        slopes = [pull(unit)[0] for unit in jnp.eye(len(carry[0]), 2)]
        return jax.tree.map(jnp.add, carry, (slopes, totals)), None

    # The divisors of loss and head loss are known only after the last part.
    slopes = [jax.tree.map(jnp.zeros_like, params)] * (1 if recipe.kind == DFLASH else 2)
    zeros = [jnp.float32(0)] * len(dataclasses.fields(objective.Sums))
    carry = (slopes, objective.Sums(*zeros))
    (slopes, totals), _ = jax.lax.scan(one, carry, split_rows(whole, recipe.parts))
    shares = (
        1 / objective.divisor(totals.weight),
        recipe.head_weight / objective.divisor(totals.head_weight),
    )
    slope = jax.tree.map(lambda *x: sum(map(operator.mul, x, shares)), *slopes)
    return slope, objective.total(recipe, totals)[1]


def check_gradient(pair: Pair, recipe: Recipe, params: dict, target: dict) -> None:
    """Evaluate the gradient of a batch by shapes; errors are those of the modules' members."""
    bucket = recipe.buckets[0]
    tokens = jax.ShapeDtypeStruct((bucket.rows, bucket.length), jnp.int32)
    wanted = jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    count = recipe.blocks(0) or 1

    def evaluated(params: dict, target: dict, rows: Any, number: Any) -> Any:
        return gradient(pair, recipe, params, target, rows, None, number, count)

    jax.eval_shape(evaluated, params, target, (tokens, wanted), number)


def split_rows(tree: Any, parts: int) -> Any:
    """Reshape arrays [B, ...] to [parts, B / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), tree)


def step(
    pair: Pair, recipe: Recipe, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return one training step: (state, frozen, rows, features, number, count) -> (state, metrics).

    See `gradient` for the arguments.
    """

    def advance(
        state: TrainState,
        frozen: dict,
        rows: tuple[Array, Array],
        features: TargetFeatures | None,
        number: Array,
        count: int,
    ) -> tuple[TrainState, dict[str, Array]]:
        slope, metrics = gradient(pair, recipe, state.params, frozen, rows, features, number, count)
        updates, memory = optimizer.update(slope, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics["gradient"] = optax.tree.norm(slope)
        average = averaged(state.average, params, recipe.average, number)
        return TrainState(params=params, optimizer=memory, average=average), metrics

    return advance


def averaged(average: dict | None, params: dict, decay: float, number: Array) -> dict | None:
    """Return the average of the parameters after one more step; None if none is kept.

    In step n its decay is at most (1 + n) / (10 + n), so that the first weights, which may be
    random, are soon forgotten.
    """
    if average is None:
        return None
    kept = jnp.minimum(decay, (1.0 + number) / (10.0 + number))
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new, average, params)
