"""Anchors of training blocks, and which slots of a block are trained. Traced and pure."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key


def sample(
    key: Key[Array, ""], valid: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Sample `count` distinct anchors per row, uniformly among the valid positions, ascending.

    Returns:
      Positions and whether each is alive. A row with fewer valid positions is filled with dead
      anchors: position 0 and False.
    """
    noise = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    best, places = jax.lax.top_k(noise, count)
    alive = best >= 0.0
    order = jnp.argsort(jnp.where(alive, places, valid.shape[1]), axis=1)
    alive = jnp.take_along_axis(alive, order, axis=1)
    return jnp.where(alive, jnp.take_along_axis(places, order, axis=1), 0), alive


def startable(wanted: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Return the positions that may be anchors: an assistant token followed by another one.

    Position 0 is never an anchor, because its context would be empty.
    """
    following = jnp.roll(wanted, -1, axis=1).at[:, -1].set(False)
    return (wanted & following).at[:, 0].set(False)


def slots(anchors: Int[Array, "B N"], block: int, length: int) -> Int[Array, "B N T"]:
    """Return positions anchor .. anchor+T-1 of every block, clipped to the end of the row."""
    return jnp.minimum(anchors[:, :, None] + jnp.arange(block)[None, None, :], length - 1)


def trained(
    tokens: Int[Array, "B S"],
    wanted: Bool[Array, "B S"],
    best: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
    alive: Bool[Array, "B N"],
    block: int,
) -> tuple[Int[Array, "B N T-1"], Bool[Array, "B N T-1"]]:
    """Return the labels of slots 1 .. T-1, and which slots count in the loss.

    The label of a slot is the target's argmax token there, given the row's tokens before it. A
    slot counts while every earlier label equals the row's token, that is, while the row is the
    target's greedy continuation of the anchor.

    Args:
      best: the target's argmax token after each position.
    """
    length = tokens.shape[1]
    places = slots(anchors, block, length)
    labels = gather(best, places[:, :, :-1])
    agrees = labels == gather(tokens, places[:, :, 1:])
    inside = anchors[:, :, None] + jnp.arange(1, block)[None, None, :] < length
    legal = inside & gather(wanted, places[:, :, 1:])
    before = jnp.concatenate([alive[:, :, None], (agrees & legal)[:, :, :-1]], axis=2)
    return labels, legal & jnp.cumprod(before, axis=2).astype(bool)


def gather(values: Array, places: Int[Array, "B N T"]) -> Array:
    """Return values[b, places[b, n, t]]."""
    rows, count, width = places.shape
    return jnp.take_along_axis(values, places.reshape(rows, -1), axis=1).reshape(rows, count, width)
