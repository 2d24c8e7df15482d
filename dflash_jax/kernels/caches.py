"""Caches of layers, and functions of trees of arrays whose first axis is the row.

Letters: B rows, S cache slots, K kv heads, H head dim. Recurrent layers: N value heads, P key
width, Q value width, C convolved channels, W convolution inputs kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

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
    inputs: Float[Array, "B W C"]  # inputs of the convolution, oldest first

    def restart(self, rows: Bool[Array, " B"]) -> "RecurrentCache":
        """Return the cache with some rows as before any token."""
        return zero_rows(self, rows)


@struct.dataclass
class ConvCache:
    """The last inputs of a layer that is a convolution only; updated as a `RecurrentCache`."""

    inputs: Float[Array, "B W C"]  # oldest first

    def restart(self, rows: Bool[Array, " B"]) -> "ConvCache":
        """Return the cache with some rows as before any token."""
        return zero_rows(self, rows)


Cache = LayerCache | RecurrentCache | ConvCache
# Arrays of one layer: keys, values [K, C, H] and scales [K, C] of int8 ones; or state, inputs.
LayerSegment = tuple[Num[Array, "..."], ...]


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


def has_caches(state: Any) -> bool:
    """Return whether a state consists of caches of layers, which `take_part` cuts."""
    return isinstance(state, tuple) and all(isinstance(cache, Cache) for cache in state)


def take_part(
    caches: Sequence[Cache], row: Int[Array, ""], start: Int[Array, ""], length: int
) -> tuple[LayerSegment, ...]:
    """Return a row's part of caches for `length` positions, right after they were fed."""

    def cut(x: Num[Array, "B K S ..."]) -> Num[Array, "K C ..."]:
        size = (1, x.shape[1], length, *x.shape[3:])
        return jax.lax.dynamic_slice(x, _corner(x, row, start), size)[0]

    def take(cache: Cache) -> LayerSegment:
        if not isinstance(cache, LayerCache):
            return tuple(x[row] for x in jax.tree.leaves(cache))
        if cache.ring:
            at = _ring_slots(cache, start, length)
            return tuple(x[row, :, at].swapaxes(0, 1) for x in jax.tree.leaves(cache))
        return tuple(map(cut, jax.tree.leaves(cache)))

    return tuple(map(take, caches))


def put_part(
    caches: Sequence[Cache],
    row: Int[Array, ""],
    start: Int[Array, ""],
    part: Sequence[LayerSegment],
) -> tuple[Cache, ...]:
    """Put what `take_part` returned into a row of caches."""

    def put(cache: Cache, held: LayerSegment) -> Cache:
        arrays, tree = jax.tree.flatten(cache)
        pairs = zip(arrays, held, strict=True)
        if not isinstance(cache, LayerCache):
            return tree.unflatten(x.at[row].set(new) for x, new in pairs)
        if cache.ring:
            at = _ring_slots(cache, start, held[0].shape[1])
            return tree.unflatten(
                x.at[row, :, at].set(new.swapaxes(0, 1), unique_indices=True) for x, new in pairs
            )
        return tree.unflatten(
            jax.lax.dynamic_update_slice(x, new[None], _corner(x, row, start)) for x, new in pairs
        )

    return tuple(map(put, caches, part))


def _corner(x: Num[Array, "B K S ..."], row: Int[Array, ""], start: Int[Array, ""]) -> Any:
    return (row, 0, start, *(0,) * (x.ndim - 3))


def _ring_slots(cache: LayerCache, start: Int[Array, ""], length: int) -> Int[Array, " C"]:
    return (start + jnp.arange(length)) % cache.slots
