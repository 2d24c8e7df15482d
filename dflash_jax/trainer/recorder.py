"""A drafter without weights that keeps the target's taps: features recorded while decoding.

Its context caches hold the taps themselves, so the programs of any engine record them. It drafts
nothing; its requests decode plainly.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.nn.attention import Positions, write_keys_values


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A drafter that keeps taps (a `graph.protocols.Drafter`).

    Attributes:
      taps: the hidden states to keep; each cache holds two of them, as keys and as values.
      width: length of a hidden state.
    """

    taps: tuple[int, ...]
    width: int
    block: int = 2

    def empty(self, make: CacheMaker) -> tuple[LayerCache, ...]:
        """Return empty caches."""
        return tuple(make(1, self.width, None) for _ in self.taps[::2])

    def observe(
        self,
        params: Any,
        caches: Sequence[LayerCache],
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> tuple[LayerCache, ...]:
        """Return the caches with the taps of T tokens at start .. start+T-1."""
        positions = Positions.of(start, tokens.shape[1])
        pairs = zip(taps[::2], [*taps[1::2], taps[-1]], caches, strict=False)
        return tuple(
            write_keys_values(cache, k[:, :, None], v[:, :, None], positions, "xla")
            for k, v, cache in pairs
        )

    def propose(
        self,
        params: Any,
        caches: Sequence[LayerCache],
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Return a block without drafts."""
        nothing = jnp.zeros((len(anchor), sampler.num_drafts), anchor.dtype)
        return sampler.certain(nothing, count=jnp.zeros_like(start)), tuple(caches)


def recorder(target: Any, layer_ids: Sequence[int]) -> Recorder:
    """Return a drafter that records the outputs of target layers, counted from 0.

    Args:
      target: a config; -1 as a layer is the input of layer 0.
    """
    return Recorder(tuple(i + 1 for i in layer_ids), target.hidden_size)


def recorded(
    caches: Sequence[LayerCache], row: Int[Array, ""], count: int
) -> Float[Array, "N S D"]:
    """Return the taps in one row of a recorder's caches; slots past its position are garbage."""
    pairs = [x[row, 0] for cache in caches for x in (cache.k, cache.v)]
    return jnp.stack(pairs[:count]).astype(jnp.float32)
