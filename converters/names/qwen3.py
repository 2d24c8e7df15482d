"""Qwen3: as Llama, with queries and keys normalised per head (`qk_norm`)."""

from dflash_jax.config import AttentionConfig, TargetConfig
from dflash_jax.converters.names import llama
from dflash_jax.converters.names.slots import Path, Slot, same


def slots(config: TargetConfig) -> list[Slot]:
    """Every parameter of the target."""
    found = llama.slots(config)
    if not config.qk_norm:
        return found
    for i in range(config.num_layers):
        found += head_norms(config, (f"layers_{i}", "attention"), f"layers.{i}.self_attn.")
    return found


def head_norms(config: AttentionConfig, at: Path, source: str) -> list[Slot]:
    """The norms of queries and of keys."""
    return [same((*at, x), f"{source}{x}.weight", config.head_dim) for x in ("q_norm", "k_norm")]
