"""DFlash 2 drafters: dynamic convolutions in every layer, and a candidate selector."""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.drafter import DrafterConfig, DrafterFields, common_config
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import Shapes
from dflash_jax.converters.formats.gguf.writer import U32, Typed
from dflash_jax.converters.formats.slots import Slot, linear, same
from dflash_jax.errors import ConfigError
from dflash_jax.families import dflash
from dflash_jax.families.entry import DrafterGguf, DrafterKind


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

    return common_config(
        fields,
        DFlash2Config,
        conv_kernel_size=size("conv_kernel_size", 2),
        conv_group_size=size("conv_group_size", 16),
        selector_rank=size("selector_rank", 256),
        selector_top_k=size("selector_top_k", 16),
    )


def _recipe_fields(recipe: Any) -> dict[str, Any]:
    return {"selector_rank": recipe.rank, "selector_top_k": recipe.candidates}


FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
GGUF_NAMES = {
    "candidate_selector.hidden_projection.weight": (
        "selector_hidden.weight",
        "selector_hproj.weight",
    ),
    "candidate_selector.predecessor_codebook": ("selector_predecessor.weight", "selector_pred"),
    "candidate_selector.successor_codebook": ("selector_successor.weight", "selector_succ"),
}
GGUF_LAYER_NAMES = {
    "attention_conv.base_kernel": ("attn_conv_base",),
    "attention_conv.kernel_projection.weight": ("attn_conv_proj.weight",),
    "mlp_conv.base_kernel": ("ffn_conv_base",),
    "mlp_conv.kernel_projection.weight": ("ffn_conv_proj.weight",),
}
GGUF_MARKS = GGUF_NAMES["candidate_selector.hidden_projection.weight"]


def slots(config: DFlash2Config) -> list[Slot]:
    """Return every parameter of the drafter."""
    width = config.hidden_size
    taps = config.conv_kernel_size
    rank = config.selector_rank
    kernels = 2 * taps * (width // config.conv_group_size)
    selector = "candidate_selector."
    slots = dflash.slots(config)
    for i in range(config.num_layers):
        for conv in ("attention_conv", "mlp_conv"):
            at = (f"layers_{i}", conv)
            source = f"layers.{i}.{conv}."
            slots.append(same((*at, "base"), f"{source}base_kernel", 2, taps, width))
            name = f"{source}kernel_projection.weight"
            slots.append(linear((*at, "kernel"), name, kernels, width))
    return [
        *slots,
        linear(("selector_hidden",), f"{selector}hidden_projection.weight", rank, width),
        same(("predecessor",), f"{selector}predecessor_codebook", config.vocab_size, rank),
        same(("successor",), f"{selector}successor_codebook", config.vocab_size, rank),
    ]


def to_hf(config: DFlash2Config) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config`."""
    return {name: getattr(config, name) for name in FIELDS}


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config` that GGUF metadata holds."""
    return {name: fields.count(name, 1 << 16) for name in FIELDS}


def to_gguf(config: DFlash2Config) -> dict[str, Typed]:
    """Return the kind's own metadata of a GGUF file."""
    return {name: Typed(U32, getattr(config, name)) for name in FIELDS}


DRAFTER = DrafterKind(
    config=DFlash2Config,
    from_hf=from_hf,
    architectures=("DFlash2DraftModel",),
    recipe_fields=_recipe_fields,
    second_loss=True,
    net="dflash_jax.families.dflash2_net",
    slots=slots,
    fields=FIELDS,
    to_hf=to_hf,
    gguf=DrafterGguf(
        names=GGUF_NAMES,
        layer_names=GGUF_LAYER_NAMES,
        marks=GGUF_MARKS,
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
