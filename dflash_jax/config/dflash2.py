"""DFlash 2 drafters: dynamic convolutions in every layer, and a candidate selector."""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.dflash import DrafterConfig, DrafterFields, common_fields
from dflash_jax.config.family import DrafterKind
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """A DFlash 2 drafter."""

    kind: str = "dflash2"
    conv_kernel_size: int = 2
    conv_group_size: int = 16  # channels that share a dynamic kernel
    selector_rank: int = 256
    selector_top_k: int = 16  # candidates per draft

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if self.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"conv_group_size is {self.conv_group_size}; it must divide the hidden size"
                f" {self.hidden_size}"
            )
        if self.selector_top_k > self.choices:
            raise ConfigError(
                f"selector_top_k is {self.selector_top_k}; the vocabulary has only {self.choices}"
            )


def from_hf(fields: DrafterFields) -> DFlash2Config:
    """Return the config of a DFlash 2 drafter."""

    def size(name: str, default: int) -> int:
        return fields.pick(name).integer(name, default)

    return DFlash2Config(
        **common_fields(fields),
        conv_kernel_size=size("conv_kernel_size", 2),
        conv_group_size=size("conv_group_size", 16),
        selector_rank=size("selector_rank", 256),
        selector_top_k=size("selector_top_k", 16),
    )


def _recipe_fields(recipe: Any) -> dict[str, Any]:
    return {"selector_rank": recipe.rank, "selector_top_k": recipe.candidates}


DRAFTER = DrafterKind(
    config=DFlash2Config,
    from_hf=from_hf,
    architectures=("DFlash2DraftModel",),
    recipe_fields=_recipe_fields,
    second_loss=True,
)
