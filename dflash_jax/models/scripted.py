"""A real drafter whose drafts are replaced by a script, for tests and benchmarks.

The whole drafter runs, whatever its kind; then each draft is replaced by the script's token for
its position. The target's own continuation as script gives perfect drafts, errors in it force an
acceptance pattern, and non-finite entries simulate a broken drafter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers, with_kernels
from dflash_jax.nn.layers import declare


def _of_overruled(name: str) -> Any:
    """Return a property that is an optional member of the replaced drafter."""
    return property(lambda self: getattr(self.overruled, name))


class Scripted(nn.Module):
    """A drafter and a parameter `script` [rows, positions, 2]: token ids as base-256 digits.

    Digits, because ids above 256 are not exact in bfloat16. Negative numbers keep the drafter's
    own token.

    Attributes:
      overruled: the drafter, a Linen module; its parameters are among those of this one.
      rows, length: of the script.
    """

    overruled: Any
    rows: int = 1
    length: int = 64
    kernels: str = "xla"

    config = _of_overruled("config")
    taps = _of_overruled("taps")
    block = _of_overruled("block")
    trained_block = _of_overruled("trained_block")
    reads = _of_overruled("reads")
    predicts_survival = _of_overruled("predicts_survival")

    def setup(self) -> None:
        """Declare the weights."""
        self.drafter = with_kernels(self.overruled, self.kernels)
        nn.share_scope(self, self.drafter)
        shape = (self.rows, self.length, 2)
        self.script = declare(self, "script", nn.initializers.zeros, shape)

    def empty(self, make: CacheMaker) -> Any:
        """As the replaced drafter."""
        return self.overruled.empty(make)

    def observe(
        self,
        state: Any,
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> Any:
        """As the replaced drafter."""
        return self.drafter.observe(state, tokens, taps, start)

    def propose(
        self,
        state: Any,
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, Any]:
        """Replace each scripted token of the drafter's proposal, with probability 1."""
        found, state = self.drafter.propose(state, anchor, start, shared, sampler)
        assert found.finite is not None
        at = start[:, None] + jnp.arange(1, found.block.shape[1])[None, :]
        digits = self.script[: len(anchor)].astype(jnp.float32)
        script = digits[:, :, 0] * 256 + digits[:, :, 1]
        said = jnp.take_along_axis(script, jnp.minimum(at, script.shape[1] - 1), axis=1)
        clear = jnp.isfinite(said)
        scripted = clear & (said >= 0)
        # Taking the drafter's own token elsewhere keeps all of its work alive in the program.
        tokens = jnp.where(scripted, jnp.nan_to_num(said).astype(jnp.int32), found.block[:, 1:])
        draft = sampler.draft(tokens, found.finite & clear.all(axis=1))
        return dataclasses.replace(draft, num_drafts=found.num_drafts), state
