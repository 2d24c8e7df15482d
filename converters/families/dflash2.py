"""DFlash 2 drafters: version 1 with convolutions and the selector's tables."""

from typing import Any

from dflash_jax.config.dflash2 import DFlash2Config
from dflash_jax.converters.families import dflash
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.converters.gguf.tensors import Shapes
from dflash_jax.converters.gguf.writer import U32, Typed
from dflash_jax.converters.names.slots import Slot, linear, same

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
    width, taps, rank = config.hidden_size, config.conv_kernel_size, config.selector_rank
    kernels = 2 * taps * (width // config.conv_group_size)
    selector = "candidate_selector."
    found = dflash.slots(config)
    for i in range(config.num_layers):
        for conv in ("attention_conv", "mlp_conv"):
            at, source = (f"layers_{i}", conv), f"layers.{i}.{conv}."
            found.append(same((*at, "base"), f"{source}base_kernel", 2, taps, width))
            name = f"{source}kernel_projection.weight"
            found.append(linear((*at, "kernel"), name, kernels, width))
    return [
        *found,
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
