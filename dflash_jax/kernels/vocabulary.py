"""Reductions of a long last axis, such as that of logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.kernels.native.layers import largest

CHUNK = 128  # values that are skipped together if their maximum is too small

Ranked = tuple[Float[Array, "*positions N"], Int[Array, "*positions N"]]  # values and indices


def argmax(
    scores: Float[Array, "*positions N"],
    kernels: str,
    live: Bool[Array, "*positions"] | None = None,
) -> Int[Array, "*positions"]:
    """Return the index of the largest score of each position, the first of equal ones.

    A position with NaN gets an undefined index within range. By XLA as two reductions: that of
    `jnp.argmax`, of values and indices together, is 3 to 7 times slower on a CPU. The barrier makes
    both reductions read the same numbers: fused into each of them, the computation of the scores
    might round differently, and no score would equal the largest.

    Args:
      live: positions that are not known to be zeros; all by default. Native kernels read no others.
    """
    if kernels == "native":
        return largest(scores, live)[0]
    scores = jax.lax.optimization_barrier(scores)
    last = scores.shape[-1] - 1
    is_best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def all_finite(
    x: Float[Array, "*positions N"], kernels: str, live: Bool[Array, "*positions"] | None = None
) -> Bool[Array, "*positions"]:
    """Return whether all numbers of each position are finite; arguments as for `argmax`."""
    if kernels == "native":
        return largest(x, live)[1]
    return jnp.isfinite(x).all(axis=-1)


def top_k(x: Float[Array, "*positions V"], count: int) -> Ranked:
    """Return the `count` largest values of each position, equal ones by index, and their indices.

    As `jax.lax.top_k`, but only the chunks with the largest maxima are searched. A token among the
    first `count` is in one of the first `count` chunks: otherwise each of those would contain a
    token before it.
    """
    *positions, vocab = x.shape
    count = min(count, vocab)
    chunks = -(-vocab // CHUNK)
    if chunks <= count:
        return _pick(x, count)
    padding = [(0, 0)] * len(positions) + [(0, chunks * CHUNK - vocab)]
    parts = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*positions, chunks, CHUNK)
    _, chosen = _pick(parts.max(axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # equal values stay in the order of their indices
    few = jnp.take_along_axis(parts, chosen[..., None], axis=-2).reshape(*positions, count * CHUNK)
    values, at = _pick(few, count)
    return values, jnp.take_along_axis(chosen, at // CHUNK, axis=-1) * CHUNK + at % CHUNK


def _pick(x: Float[Array, "*positions V"], count: int) -> Ranked:
    """Return `jax.lax.top_k` after barriers: if a slice followed, XLA would sort all of x.

    One barrier over both results would end the process where XLA splits x over a mesh.
    """
    values, ids = map(jax.lax.optimization_barrier, jax.lax.top_k(x, count))
    return values, ids
