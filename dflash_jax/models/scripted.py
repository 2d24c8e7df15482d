"""A real drafter whose drafts are replaced by a script, for tests and benchmarks.

The whole drafter runs, whatever its kind; then each draft is replaced by the script's token for
its position. The target's own continuation as script gives perfect drafts, errors in it force an
acceptance pattern, and non-finite entries simulate a broken drafter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import PAIRED, DrafterConfig
from dflash_jax.models import build_drafter
from dflash_jax.nn.draft import Draft, DraftSampler, SharedLayers
from dflash_jax.nn.layers import declare
from dflash_jax.state import LayerCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedConfig(DrafterConfig):
    """The replaced drafter, and the size of its script."""

    kind: str = "scripted"
    overruled: DrafterConfig
    script_rows: int = 1
    script_length: int = 64

    @property
    def predicts_survival(self) -> bool:
        """Whether the drafter predicts how likely its drafts are to be accepted."""
        return self.overruled.predicts_survival


class Scripted(nn.Module):
    """A drafter and a parameter `script` [rows, positions, 2]: token ids as base-256 digits.

    Digits, because ids above 256 are not exact in bfloat16. Negative numbers keep the drafter's
    own token.
    """

    config: ScriptedConfig

    def setup(self) -> None:
        """Declare the weights."""
        c = self.config
        pairing = {name: getattr(c, name) for name in PAIRED}  # `paired` may have set them
        overruled: Any = build_drafter(dataclasses.replace(c.overruled, **pairing))
        self.overruled = overruled
        nn.share_scope(self, overruled)
        shape = (c.script_rows, c.script_length, 2)
        self.script = declare(self, "script", nn.initializers.zeros, shape)

    def __call__(
        self, x: Float[Array, "B T D"], caches: Sequence[LayerCache], start: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """As the replaced drafter."""
        return self.overruled(x, caches, start)

    def context(
        self,
        taps: Sequence[Float[Array, "B T D"]],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
    ) -> tuple[LayerCache, ...]:
        """As the replaced drafter."""
        return self.overruled.context(taps, caches, start)

    def propose(
        self,
        block: Int[Array, "B T"],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
        layers: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """The drafter's proposal; each scripted token replaces its own, with probability 1."""
        found, caches = self.overruled.propose(block, caches, start, layers, sampler)
        assert found.finite is not None
        assert found.num_drafts is not None
        at = start[:, None] + jnp.arange(1, block.shape[1])[None, :]
        digits = self.script.astype(jnp.float32)
        script = digits[:, :, 0] * 256 + digits[:, :, 1]
        said = jnp.take_along_axis(script, jnp.minimum(at, script.shape[1] - 1), axis=1)
        clear = jnp.isfinite(said)
        scripted = clear & (said >= 0)
        # Taking the drafter's own token elsewhere keeps all of its work alive in the program.
        tokens = jnp.where(scripted, jnp.nan_to_num(said).astype(jnp.int32), found.block[:, 1:])
        finite, q = found.finite & clear.all(axis=1), found.q
        if q is not None:
            sure = jax.nn.one_hot(tokens, q.shape[-1], dtype=q.dtype)
            q = jnp.where(scripted[:, :, None], sure, q)
        draft = sampler.draft(tokens, q, finite)
        num_drafts = jnp.where(finite, found.num_drafts, 0)
        return dataclasses.replace(draft, num_drafts=num_drafts), caches


def build(config: ScriptedConfig) -> Scripted:
    """Return the module of a scripted drafter."""
    return Scripted(config)
