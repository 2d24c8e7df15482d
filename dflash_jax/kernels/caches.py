"""Caches of layers, and functions of trees of arrays whose first axis is the row.

Letters: B rows, S cache slots, K kv heads, H head dim. Recurrent layers: N value heads, P key
width, Q value width, C convolved channels, W convolution inputs kept.
"""

import dataclasses
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num


@struct.dataclass
class LayerCache:
    """Keys and values of one attention layer, head-major.

    A plain cache holds position p in slot p. A ring holds it in slot p mod S; S must be at
    least the window plus the widest call, so that rejected rows never hide visible keys.
    Slots at or past the row's position are garbage: always masked, later overwritten.
    Keys and values in int8 have a scale for every slot and head.
    """

    k: Num[Array, "B K S H"]
    v: Num[Array, "B K S H"]
    k_scale: Float[Array, "B K S"] | None = None
    v_scale: Float[Array, "B K S"] | None = None
    ring: bool = struct.field(pytree_node=False, default=False)

    @property
    def slots(self) -> int:
        """Number of slots S."""
        return self.k.shape[2]

    def restart(self, rows: Bool[Array, " B"]) -> "LayerCache":
        """Return the cache itself: at position 0 every slot is garbage already."""
        return self

    def commit(self, num_committed: Int[Array, " B"]) -> "LayerCache":
        """Return the cache itself: tokens are already in place, and the position masks the rest."""
        return self


@struct.dataclass
class RecurrentCache:
    """State of one recurrent layer after all tokens before the row's position.

    It has no slots to mask, so a forward pass leaves it unchanged and returns an update; only the
    update's `commit` makes the next cache.
    """

    state: Float[Array, "B N P Q"]  # float32
    inputs: Float[Array, "B W C"]  # of the convolution, oldest first

    def restart(self, rows: Bool[Array, " B"]) -> "RecurrentCache":
        """Return the cache with some rows as before any token."""
        return zero_rows(self, rows)


Cache = LayerCache | RecurrentCache


class Update(Protocol):
    """Result of a layer's forward pass over T tokens, before it is known how many are kept."""

    def commit(self, num_committed: Int[Array, " B"], /) -> Cache:
        """Return the cache after the first tokens; rows with 0 keep theirs bit for bit."""
        ...


def empty_cache(
    rows: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    *,
    dtype: DTypeLike,
    ring: bool = False,
) -> LayerCache:
    """Return a zeroed cache. Not noise: zero probability times a non-finite value is NaN."""
    shape = (rows, kv_heads, slots, head_dim)
    k, v = (jnp.zeros(shape, dtype) for _ in range(2))
    cache = LayerCache(k, v, ring=ring)
    if cache.k.dtype != jnp.int8:
        return cache
    k_scale, v_scale = (jnp.zeros(shape[:3], jnp.float32) for _ in range(2))
    return dataclasses.replace(cache, k_scale=k_scale, v_scale=v_scale)


def empty_recurrent(
    rows: int, state: tuple[int, int, int], inputs: tuple[int, int], *, dtype: DTypeLike
) -> RecurrentCache:
    """Return the cache before any token; the state [N, P, Q] is float32 whatever the dtype."""
    return RecurrentCache(
        state=jnp.zeros((rows, *state), jnp.float32), inputs=jnp.zeros((rows, *inputs), dtype)
    )


Arrays = TypeVar("Arrays")


def take_row(arrays: Arrays, row: Int[Array, ""]) -> Arrays:
    """Return one row of a tree of arrays [B, ...], as [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0), arrays)


def put_row(arrays: Arrays, one: Arrays, row: Int[Array, ""]) -> Arrays:
    """Return a tree of arrays [B, ...] with one row replaced by another tree [1, ...]."""

    def put(whole: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, new, row, axis=0)

    return jax.tree.map(put, arrays, one)


def zero_rows(arrays: Arrays, rows: Bool[Array, " B"]) -> Arrays:
    """Return a tree of arrays [B, ...] with zeros in some rows."""

    def clear(x: Array) -> Array:
        chosen = rows.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(chosen, jnp.zeros((), x.dtype), x)

    return jax.tree.map(clear, arrays)
