"""Name tables, one file for each architecture: which tensors fill which parameter."""

from collections.abc import Callable
from typing import Any

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.converters.names import (
    dflash,
    dflash2,
    dspark,
    gemma4,
    gpt_oss,
    llama,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from dflash_jax.converters.names.slots import Folder, Slot
from dflash_jax.errors import ConfigError

TARGETS: dict[str, Callable[[Any], list[Slot]]] = {
    "gemma4_text": gemma4.slots,
    "gemma4_unified_text": gemma4.slots,
    "gpt_oss": gpt_oss.slots,
    "llama": llama.slots,
    "qwen3": qwen3.slots,
    "qwen3_5_text": qwen3_5.slots,
    "qwen3_5_moe_text": qwen3_5.slots,
    "qwen3_moe": qwen3_moe.slots,
}
# model_type: what its folders hold besides, and how
FOLDERS: dict[str, Callable[[Any], Folder]] = {
    "gemma4_text": gemma4.folder,
    "gemma4_unified_text": gemma4.folder,
    "qwen3_5_text": qwen3_5.folder,
    "qwen3_5_moe_text": qwen3_5.folder,
    "qwen3_moe": qwen3_moe.folder,
}
DRAFTERS: dict[str, Callable[[Any], list[Slot]]] = {
    "dflash": dflash.slots,
    "dflash2": dflash2.slots,
    "dspark": dspark.slots,
}


def folder(config: TargetConfig) -> Folder:
    """What to expect of a Hugging Face folder that holds this target."""
    of_type = FOLDERS.get(config.model_type)
    return of_type(config) if of_type else Folder()


def slots(config: AttentionConfig) -> list[Slot]:
    """The parameters of a target or of a drafter."""
    if isinstance(config, DrafterConfig) and config.kind in DRAFTERS:
        return DRAFTERS[config.kind](config)
    if isinstance(config, TargetConfig) and config.model_type in TARGETS:
        return TARGETS[config.model_type](config)
    kind = config.model_type if isinstance(config, TargetConfig) else type(config).__name__
    raise ConfigError(
        f"no name table for {kind}; there is one for {', '.join(TARGETS)} and drafters"
    )
