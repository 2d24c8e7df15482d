"""Training of drafters: the engine's own modules, called on many anchored blocks at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.decode.steps import Pair
from dflash_jax.nn.layers import rms_norm
from dflash_jax.train import anchors as anchoring
from dflash_jax.train import objective
from dflash_jax.train.attention import split_attention
from dflash_jax.train.features import Reading, reading
from dflash_jax.train.recipe import Recipe
from dflash_jax.train.target import TrainState


def anchored(
    module: Any,
    taps: Sequence[Float[Array, "B S D"]],
    blocks: Float[Array, "B N T D"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N T D"]:
    """The hidden states of N blocks, each as the cached call would draft it at its anchor.

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
    return by_row(rms_norm(x, backbone.norm, c.rms_norm_eps))


@struct.dataclass
class Blocks:
    """Anchors of a batch; labels of their drafted places, and which of them count."""

    anchors: Int[Array, "B N"]
    labels: Int[Array, "B N R"]
    counts: Bool[Array, "B N R"]


def choose(
    key: Key[Array, ""],
    pair: Pair,
    best: Int[Array, "B S"],
    tokens: Int[Array, "B S"],
    wanted: Bool[Array, "B S"],
    count: int,
) -> Blocks:
    """Random blocks of a batch."""
    assert pair.drafter is not None
    width = pair.drafter.config.step_width
    anchors, alive = anchoring.sample(key, anchoring.startable(wanted), count)
    labels, counts = anchoring.trained(tokens, wanted, best, anchors, alive, width)
    return Blocks(anchors=anchors, labels=labels, counts=counts)


def drafted(
    pair: Pair,
    params: dict[str, Any],
    read: Reading,
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N R D"]:
    """Hidden states of the places that predict a token, of blocks that start at `anchors`.

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
    kind = jax.tree.leaves(params["drafter"])[0].dtype
    taps = tuple(tap.astype(kind) for tap in read.taps)
    hidden = pair.drafter_call(params, taps, x.astype(kind), anchors, method=anchored)
    return hidden if config.sample_from_anchor else hidden[:, :, 1:]


def scores(
    pair: Pair,
    params: dict[str, Any],
    recipe: Recipe,
    read: Reading,
    tokens: Int[Array, "B S"],
    blocks: Blocks,
) -> objective.Scores:
    """Scores [B, N, R] of all drafted places."""
    assert pair.drafter is not None
    length, count = tokens.shape[1], blocks.labels.shape[2]
    before = anchoring.slots(blocks.anchors, count, length)  # the place before each drafted one
    teacher = None
    if read.hidden is not None:
        flat = before.reshape(len(tokens), -1, 1)
        teacher = jnp.take_along_axis(read.hidden, flat, axis=1).reshape(*before.shape, -1)
    places = objective.Places(
        hidden=drafted(pair, params, read, tokens, blocks.anchors),
        labels=blocks.labels,
        previous=anchoring.gather(tokens, before),
        teacher=teacher,
    )
    score = objective.scorer(
        pair.drafter,
        lambda x: pair.target_call(params, x, method=pair.head),
        lambda x: pair.target_call(params, x, method="logits"),
        recipe.loss,
    )
    return objective.in_chunks(score, params["drafter"], places, pair.target.config.vocab_size)


def loss(
    pair: Pair, recipe: Recipe, params: dict, frozen: dict, read: Reading, tokens: Array, at: Blocks
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a batch and what is logged; to be differentiated by `params`, the drafter's."""
    found = scores(pair, {"target": frozen, "drafter": params}, recipe, read, tokens, at)
    return objective.total(recipe, found, at.counts)


def gradient(
    pair: Pair,
    recipe: Recipe,
    params: dict,
    frozen: dict,
    rows: tuple[Array, Array],
    read: Reading | None,
    number: Array,
    count: int,
) -> tuple[dict, dict[str, Array]]:
    """Gradient and metrics of one batch.

    Args:
      frozen: the target's parameters.
      rows: tokens and what of them is wanted.
      read: what the target says about them; None asks it now.
      number: of the step; with the recipe's seed it decides the anchors.
      count: anchors in a row.
    """
    tokens, wanted = rows[0].astype(jnp.int32), rows[1]
    if read is None:
        keep = objective.wants_distribution(recipe)
        read = reading(pair, frozen, tokens, dtype=recipe.dtype, keep=keep)
    if read.hidden is not None:
        dtype = jax.tree.leaves(frozen)[0].dtype
        read = read.replace(hidden=read.hidden.astype(dtype))  # pyrefly: ignore
    key = jax.random.fold_in(jax.random.key(recipe.seed), number)
    blocks = choose(key, pair, read.best, tokens, wanted, count)
    differentiate = jax.grad(loss, argnums=2, has_aux=True)
    return differentiate(pair, recipe, params, frozen, read, tokens, blocks)


def step(
    pair: Pair, recipe: Recipe, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The function of one step: (state, frozen, rows, reading, number, count) -> ..., see
    `gradient`.
    """

    def advance(
        state: TrainState,
        frozen: dict,
        rows: tuple[Array, Array],
        read: Reading | None,
        number: Array,
        count: int,
    ) -> tuple[TrainState, dict[str, Array]]:
        slope, metrics = gradient(pair, recipe, state.params, frozen, rows, read, number, count)
        updates, memory = optimizer.update(slope, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics["gradient"] = optax.tree.norm(slope)
        return TrainState(params=params, optimizer=memory), metrics

    return advance


def initial(pair: Pair, seed: int) -> dict[str, Any]:
    """Fresh parameters; a DFlash 2 drafter starts as a DFlash one, its selector saying nothing."""
    drafter = pair.drafter
    assert drafter is not None
    c = drafter.config
    taps = [jnp.zeros((1, 1, c.hidden_size))] * len(c.target_layer_ids)
    blocks = jnp.zeros((1, 1, c.block_size, c.hidden_size))
    where = jnp.zeros((1, 1), jnp.int32)
    made: Any = drafter.init(jax.random.key(seed), taps, blocks, where, method=anchored)
    params = made["params"]
    if "successor" in params:
        params["successor"] = jnp.zeros_like(params["successor"])
    return params
