"""Name tables, one file for each architecture: which tensors fill which parameter."""

from collections.abc import Callable
from typing import Any

from converters.canonical import Canonical
from converters.names import dflash, gpt_oss, llama, qwen3, qwen3_moe
from converters.names.slots import Slot
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError

TARGETS: dict[str, Callable[[Any], list[Slot]]] = {
    "gpt_oss": gpt_oss.slots,
    "llama": llama.slots,
    "qwen3": qwen3.slots,
    "qwen3_moe": qwen3_moe.slots,
}
# model_type: the same tensors in the layout of the table, where files come in more than one
LAYOUTS: dict[str, Callable[[Canonical], Canonical]] = {"qwen3_moe": qwen3_moe.unstacked}


def laid_out(config: TargetConfig, found: Canonical) -> Canonical:
    """A target's tensors in the layout of its name table."""
    change = LAYOUTS.get(config.model_type)
    return change(found) if change else found


def slots(config: AttentionConfig) -> list[Slot]:
    """The parameters of a target or of a drafter."""
    if isinstance(config, DrafterConfig):
        return dflash.slots(config)
    if isinstance(config, TargetConfig) and config.model_type in TARGETS:
        return TARGETS[config.model_type](config)
    kind = config.model_type if isinstance(config, TargetConfig) else type(config).__name__
    raise ConfigError(
        f"no name table for {kind}; there is one for {', '.join(TARGETS)} and drafters"
    )
