"""A drafter without weights that keeps the target's taps: features recorded while decoding.

Its context caches hold the taps themselves, so the programs of any engine record them. It drafts
nothing; its requests decode plainly.
"""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.nn.attention import write_keys_values
from dflash_jax.nn.draft import Draft, DraftSampler, SharedLayers
from dflash_jax.state import LayerCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecorderConfig(DrafterConfig):
    """Which taps to keep; each cache holds two of them, as keys and as values."""

    kind: str = "recorder"


def recorder(target: TargetConfig, layer_ids: Sequence[int]) -> RecorderConfig:
    """Return the config that records the outputs of target layers, counted from 0."""
    layers = -(-len(layer_ids) // 2)
    return RecorderConfig(
        hidden_size=target.hidden_size,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=target.hidden_size,
        intermediate_size=1,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        vocab_size=target.vocab_size,
        block_size=2,
        mask_token_id=0,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=target.num_layers,
        windows=(None,) * layers,
        causal=(False,) * layers,
    )


class Recorder(nn.Module):
    """The module of a `RecorderConfig`."""

    config: RecorderConfig

    def __call__(
        self, x: Float[Array, "B T D"], caches: Sequence[LayerCache], start: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        return x, tuple(caches)

    def context(
        self,
        taps: Sequence[Float[Array, "B T D"]],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
    ) -> tuple[LayerCache, ...]:
        """Return the caches with the taps of T tokens at start .. start+T-1."""
        pairs = zip(taps[::2], [*taps[1::2], taps[-1]], caches, strict=False)
        return tuple(
            write_keys_values(cache, k[:, :, None], v[:, :, None], start) for k, v, cache in pairs
        )

    def propose(
        self,
        block: Int[Array, "B T"],
        caches: Sequence[LayerCache],
        start: Int[Array, " B"],
        layers: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, tuple[LayerCache, ...]]:
        """Return a block without drafts."""
        draft = sampler.draft(block[:, 1:], None, jnp.ones(len(block), bool))
        return dataclasses.replace(draft, num_drafts=jnp.zeros_like(start)), tuple(caches)


def recorded(
    caches: Sequence[LayerCache], row: Int[Array, ""], count: int
) -> Float[Array, "N S D"]:
    """Return the taps in one row of a recorder's caches; slots past its position are garbage."""
    pairs = [x[row, 0] for cache in caches for x in (cache.k, cache.v)]
    return jnp.stack(pairs[:count]).astype(jnp.float32)


def build(config: RecorderConfig) -> Recorder:
    """Return the module of a recorder."""
    return Recorder(config)
