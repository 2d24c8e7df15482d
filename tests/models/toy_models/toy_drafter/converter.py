"""Tensor names and forms of the made-up kind of drafter."""

from typing import Any

from dflash_jax.converters.families import dflash
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.converters.gguf.tensors import Shapes
from dflash_jax.converters.gguf.writer import F32, Typed
from dflash_jax.converters.names.slots import Slot, same
from toy_models.toy_drafter.config import ToyDrafterConfig

FIELDS = ("toy_scale",)
SPECULATOR = "ToySpeculator"
GGUF_NAMES = {"toy_gain": ("toy_gain.weight",)}
GGUF_MARKS = ("toy_gain.weight",)


def slots(config: ToyDrafterConfig) -> list[Slot]:
    return [*dflash.slots(config), same(("toy_gain",), "toy_gain", config.hidden_size)]


def to_hf(config: ToyDrafterConfig) -> dict[str, Any]:
    return {"toy_scale": config.toy_scale}


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    return {"toy_scale": fields.number("toy_scale", 1.0)}


def to_gguf(config: ToyDrafterConfig) -> dict[str, Typed]:
    return {"toy_scale": Typed(F32, config.toy_scale)}
