"""Attention of many drafted blocks over one shared context, without a dense mask.

Context scores and in-block scores are computed separately and share one softmax, so that a query
has S + T columns instead of S + N*T. Blocks are processed a few at a time and recomputed in the
backward pass, so that the scores of all blocks never exist together.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.nn.layers import product
from dflash_jax.train.objective import fewest_parts

SCORE_ELEMENTS = 1 << 23  # of one chunk: 32 MiB
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
    query, key = jnp.arange(width)[:, None], jnp.arange(width)[None, :]
    seen = key <= query if causal else jnp.ones((width, width), bool)
    if window is None:
        return seen
    return seen & (jnp.abs(query - key) < window)
