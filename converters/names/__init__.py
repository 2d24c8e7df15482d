"""Name tables, one file for each architecture: which tensors fill which parameter."""

from collections.abc import Callable
from typing import Any

from converters.names import dflash, gemma4, llama, qwen3
from converters.names.slots import Slot
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError

TARGETS: dict[str, Callable[[Any], list[Slot]]] = {
    "gemma4_text": gemma4.slots,
    "gemma4_unified_text": gemma4.slots,
    "llama": llama.slots,
    "qwen3": qwen3.slots,
}
# model_type: patterns of tensors that are not part of the text model, and why
IGNORED: dict[str, Callable[[Any], dict[str, str]]] = {
    "gemma4_text": gemma4.ignored,
    "gemma4_unified_text": gemma4.ignored,
}


def ignored(config: TargetConfig) -> dict[str, str]:
    """Tensors of a target's files that are not loaded, as patterns, and why."""
    of_type = IGNORED.get(config.model_type)
    return of_type(config) if of_type else {}


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
