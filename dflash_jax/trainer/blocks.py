"""Blocks of a training row: anchors, slots that are trained, and attention of many blocks.

Attention over one shared context takes no dense mask: context scores and in-block scores are
computed separately and share one softmax, so that a query has S + T columns instead of S + N*T.
Blocks are processed a few at a time and recomputed in the backward pass, so that the scores of all
blocks never exist together. All of this is traced and pure.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.nn.layers import product
from dflash_jax.trainer.objective import fewest_parts


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


EVEN = 8  # many blocks are a multiple of it, so that they can be processed a few at a time


def chained_share(count: int, share: float) -> np.ndarray:
    """Return which of `count` anchors of a row are chained: evenly spread, all but one at most."""
    moved = min(int(share * count), count - 1)
    if moved > EVEN:
        moved -= moved % EVEN
    return np.arange(moved) * count // max(moved, 1)


def following(
    tokens: Int[Array, "B S"],
    wanted: Bool[Array, "B S"],
    anchors: Int[Array, "B N"],
    block: int,
) -> tuple[Int[Array, "B N T-1"], Bool[Array, "B N T-1"]]:
    """Return the row's own tokens in slots 1 .. T-1, and which of them a drafter has to produce."""
    places = slots(anchors, block, tokens.shape[1])[:, :, 1:]
    inside = anchors[:, :, None] + jnp.arange(1, block)[None, None, :] < tokens.shape[1]
    return gather(tokens, places), inside & gather(wanted, places)


def after_round(
    anchors: Int[Array, "B N"],
    alive: Bool[Array, "B N"],
    accepted: Bool[Array, "B N T-1"],
    wanted: Bool[Array, "B S"],
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Return the anchors of the rounds that decoding would make after blocks at `anchors`.

    A round commits the leading accepted drafts and one more token, the next anchor. An anchor after
    which the row has no two tokens of the answer left is dead.

    Args:
      accepted: which drafts are the row's tokens.
    """
    next_anchors = anchors + 1 + jnp.cumprod(accepted.astype(jnp.int32), axis=2).sum(axis=2)
    last = wanted.shape[1] - 1
    places = jnp.minimum(next_anchors, last)
    alive &= (next_anchors <= last) & jnp.take_along_axis(startable(wanted), places, axis=1)
    return jnp.where(alive, places, 0), alive


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


SCORE_ELEMENTS = 1 << 23  # scores of one chunk: 32 MiB
HIDDEN = -1e30  # finite: a block at position 0 has no context, and -inf would give NaN gradients


def split_attention(
    queries: Float[Array, "B N T K G H"],
    context: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    block: tuple[Float[Array, "B N T K H"], Float[Array, "B N T K H"]],
    anchors: Int[Array, "B N"],
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "B N T K*G*H"]:
    """Attend over [context before the anchor | the block itself], with a float32 softmax.

    Args:
      context, block: keys and values.
      causal: whether a slot attends only to slots up to itself.
      window: maximum distance of a key plus one; None for no limit.
    """
    rows, count, width, kv, groups, head = queries.shape
    columns = context[0].shape[1] + width
    parts = fewest_parts(count, rows * count * width * kv * groups * columns, SCORE_ELEMENTS)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, parts, count // parts, *x.shape[2:]), 1, 0)

    def some(chunk: tuple[Array, Array, Array, Array]) -> Array:
        queries, keys, values, anchors = chunk
        return _attend(queries, context, (keys, values), anchors, causal=causal, window=window)

    chunks = (queries, *block, anchors)
    if parts == 1:
        return some(chunks)
    attended = jax.lax.map(jax.checkpoint(some), jax.tree.map(cut, chunks))
    return jnp.moveaxis(attended, 0, 1).reshape(rows, count, width, kv * groups * head)


def _attend(
    queries: Float[Array, "B N T K G H"],
    context: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    block: tuple[Float[Array, "B N T K H"], Float[Array, "B N T K H"]],
    anchors: Int[Array, "B N"],
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "B N T K*G*H"]:
    rows, count, width, kv, groups, head = queries.shape
    scale = jnp.float32(head**-0.5)
    dtype = queries.dtype
    far = product("bntkgh,bskh->bkgnts", queries, context[0]) * scale
    near = product("bntkgh,bnukh->bkgntu", queries, block[0]) * scale
    seen = before_anchor(anchors, width, context[0].shape[1], window)
    far = jnp.where(seen[:, None, None], far, HIDDEN)
    near = jnp.where(inside_block(width, causal, window)[None, None, None, None], near, HIDDEN)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(dtype)
    far, near = jnp.split(weights, [context[0].shape[1]], axis=-1)
    out = product("bkgnts,bskh->bntkgh", far, context[1])
    out += product("bkgntu,bnukh->bntkgh", near, block[1])
    return out.astype(dtype).reshape(rows, count, width, kv * groups * head)


def before_anchor(
    anchors: Int[Array, "B N"], width: int, length: int, window: int | None
) -> Bool[Array, "B N T S"]:
    """Return the context mask: positions strictly before the anchor and inside the window.

    The anchor itself is masked: when a block is drafted, the target has not run on its anchor.
    """
    places = jnp.arange(length)[None, None, None, :]
    seen = jnp.broadcast_to(places < anchors[:, :, None, None], (*anchors.shape, width, length))
    if window is None:
        return seen
    query = anchors[:, :, None] + jnp.arange(width)[None, None, :]
    return seen & (query[..., None] - places < window)


def inside_block(width: int, causal: bool, window: int | None) -> Bool[Array, "T T"]:
    """Return the mask [query, key] inside a block."""
    query = jnp.arange(width)[:, None]
    key = jnp.arange(width)[None, :]
    seen = key <= query if causal else jnp.ones((width, width), bool)
    if window is None:
        return seen
    return seen & (jnp.abs(query - key) < window)
