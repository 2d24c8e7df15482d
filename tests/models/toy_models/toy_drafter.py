"""A made-up kind of drafter: DFlash with scaled hidden states."""

import dataclasses
from typing import Any

from dflash_jax.config.drafter import DrafterConfig, DrafterFields, common_config
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import Shapes
from dflash_jax.converters.formats.gguf.writer import F32, Typed
from dflash_jax.converters.formats.slots import Slot, same
from dflash_jax.families import dflash
from dflash_jax.families.entry import DrafterGguf, DrafterKind, Speculator


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyDrafterConfig(DrafterConfig):
    kind: str = "toy_drafter"
    toy_scale: float = 1.0


def from_hf(fields: DrafterFields) -> ToyDrafterConfig:
    scale = fields.pick("toy_scale").number("toy_scale", 1.0)
    return common_config(fields, ToyDrafterConfig, toy_scale=scale)


def slots(config: ToyDrafterConfig) -> list[Slot]:
    return [*dflash.slots(config), same(("toy_gain",), "toy_gain", config.hidden_size)]


def to_hf(config: ToyDrafterConfig) -> dict[str, Any]:
    return {"toy_scale": config.toy_scale}


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    return {"toy_scale": fields.number("toy_scale", 1.0)}


def to_gguf(config: ToyDrafterConfig) -> dict[str, Typed]:
    return {"toy_scale": Typed(F32, config.toy_scale)}


DRAFTER = DrafterKind(
    config=ToyDrafterConfig,
    from_hf=from_hf,
    architectures=("ToyDraftModel",),
    net="toy_models.toy_drafter_net",
    slots=slots,
    fields=("toy_scale",),
    to_hf=to_hf,
    speculator=Speculator(name="ToySpeculator"),
    gguf=DrafterGguf(
        names={"toy_gain": ("toy_gain.weight",)},
        marks=("toy_gain.weight",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
