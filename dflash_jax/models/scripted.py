"""A real drafter whose proposals are overruled by a script: for tests and benchmarks.

The whole drafter runs, then each place says what the script holds for its position. With the
target's own continuation as the script it is an oracle, with errors in it an acceptance
pattern can be forced, and with non-finite entries it breaks on demand.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import DrafterConfig
from dflash_jax.models.dflash import DFlash
from dflash_jax.state import LayerCache

SURE = 1e4  # logit of the scripted token


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedConfig(DrafterConfig):
    """A DFlash config with the size of its script."""

    kind: str = "scripted"
    script_rows: int = 1
    script_length: int = 64


class Scripted(DFlash):
    """DFlash with a parameter `script` [rows, positions, 2]: token ids as two base-256 digits.

    Digits, because ids above 256 are not exact in bfloat16.
    """

    config: ScriptedConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def setup(self) -> None:
        super().setup()
        shape = (self.config.script_rows, self.config.script_length, 2)
        self.script = self.param("script", lambda _: jnp.zeros(shape, jnp.float32))

    def draft(
        self,
        x: Float[Array, "B T D"],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
        head: Callable[[Array], Array],
    ) -> tuple[Float[Array, "B T V"], tuple[LayerCache, ...]]:
        """The drafter's logits, pushed to the scripted token of each position."""
        logits, caches = super().draft(x, caches, start, head)
        at = start[:, None] + jnp.arange(x.shape[1])[None, :]
        digits = self.script.astype(jnp.float32)
        script = digits[:, :, 0] * 256 + digits[:, :, 1]
        said = jnp.take_along_axis(script, jnp.minimum(at, script.shape[1] - 1), axis=1)
        ids = jnp.nan_to_num(said).astype(jnp.int32)
        sure = jax.nn.one_hot(ids, logits.shape[-1], dtype=jnp.float32) * jnp.float32(SURE)
        return logits + sure + (said - said)[:, :, None], caches


def build(config: ScriptedConfig) -> Scripted:
    """The module of a scripted drafter."""
    return Scripted(config)
