"""The caches that a plan asks for."""

import dataclasses

import jax.numpy as jnp

from dflash_jax.plan import Dtype, Plan, WeightLayout, as_number
from dflash_jax.state import LayerCache, RecurrentCache, empty_cache, empty_recurrent

__all__ = ["CacheMaker", "Dtype", "Plan", "WeightLayout", "as_number"]


@dataclasses.dataclass(frozen=True)
class CacheMaker:
    """Empty caches in a plan's sizes, one per layer."""

    plan: Plan

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        """The cache of an attention layer."""
        plan, ring = self.plan, self.plan.ring_slots(window)
        return empty_cache(
            plan.rows,
            kv_heads,
            ring or plan.slots,
            head_dim,
            dtype=jnp.dtype(plan.dtype if plan.kv_dtype == "auto" else plan.kv_dtype),
            ring=ring is not None,
            kernel=plan.kernels == "pallas",
        )

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """The cache of a recurrent layer: its state [N, P, Q] and convolution inputs [W, C]."""
        return empty_recurrent(self.plan.rows, state, inputs, dtype=jnp.dtype(self.plan.dtype))
