"""DFlash 2 drafters: as version 1, with convolutions and the selector's tables."""

from dflash_jax.config.dflash2 import DFlash2Config
from dflash_jax.converters.names import dflash
from dflash_jax.converters.names.slots import Slot, linear, same


def slots(config: DFlash2Config) -> list[Slot]:
    """Every parameter of the drafter."""
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
