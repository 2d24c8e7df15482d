"""A made-up kind of drafter: DFlash with scaled hidden states."""

import dataclasses

from dflash_jax.config.dflash import DrafterConfig, DrafterFields, common_fields
from dflash_jax.config.family import DrafterKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyDrafterConfig(DrafterConfig):
    kind: str = "toy_drafter"
    toy_scale: float = 1.0


def from_hf(fields: DrafterFields) -> ToyDrafterConfig:
    scale = fields.pick("toy_scale").number("toy_scale", 1.0)
    return ToyDrafterConfig(**common_fields(fields), toy_scale=scale)


DRAFTER = DrafterKind(config=ToyDrafterConfig, from_hf=from_hf, architectures=("ToyDraftModel",))
