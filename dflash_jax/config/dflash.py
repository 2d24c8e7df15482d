"""DFlash v1 drafters."""

import dataclasses
from typing import Any

from dflash_jax.config.base import (
    SLIDING,
    AttentionConfig,
    dtype_name,
    geometry,
    layer_windows,
)
from dflash_jax.config.fields import Fields
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(AttentionConfig):
    """A DFlash v1 drafter; it borrows embedding and head from its target."""

    kind: str = "dflash"  # the file in models/ that builds it
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of decoder layer i, counted from 0
    num_target_layers: int
    windows: tuple[int | None, ...]  # per layer; None sees everything
    causal: tuple[bool, ...]  # per layer, inside the block
    input_embedding_scale: float | None = None  # times raw table rows; None: as the target's
    rounded_embedding_scale: bool = False  # the scale is the target's, rounded as it does
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None  # 0 is none; None: as the target's
    dtype: str = "float32"


def drafter_config(fields: dict[str, Any], where: str = "config.json") -> DrafterConfig:
    """The DFlash v1 drafter described by a published config.

    Drafter fields are looked up in `dflash_config` first, then at the top level (dflash 0.1.0).
    A sliding layer is causal inside its block unless the config says `is_causal`. Embedding
    scale and softcap stay None where the config is silent: `paired` takes the target's.
    """
    f = Fields(fields, where)
    kinds = f.get("architectures", ["DFlashDraftModel"])
    if kinds != ["DFlashDraftModel"]:
        raise ConfigError(f"{where}: architectures is {kinds}; expected ['DFlashDraftModel']")
    f.must_be("model_type", "qwen3")
    f.must_be("hidden_act", "silu")
    dflash = f.inner("dflash_config")

    def pick(name: str) -> Fields:
        f.used.add(name)
        return dflash if dflash.get(name) is not None else f

    def optional(name: str) -> float | None:
        return None if pick(name).get(name) is None else pick(name).number(name, 0.0)

    taps = pick("target_layer_ids").get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        raise ConfigError(
            f"{where}: target_layer_ids is {taps!r}; expected the list of target layers whose"
            " outputs the drafter reads (it cannot be guessed safely)"
        )
    size = geometry(f)
    layers = layer_windows(f, size["num_layers"])
    is_causal = f.get("is_causal")
    vocab_size = f.integer("vocab_size")
    config = DrafterConfig(
        vocab_size=vocab_size,
        block_size=pick("block_size").integer("block_size", 16),
        mask_token_id=pick("mask_token_id").integer("mask_token_id"),
        target_layer_ids=tuple(taps),
        num_target_layers=f.integer("num_target_layers", 0),
        windows=tuple(window for _, window in layers),
        causal=tuple(
            kind == SLIDING if is_causal is None else bool(is_causal) for kind, _ in layers
        ),
        input_embedding_scale=optional("input_embedding_scale"),
        output_multiplier=pick("output_multiplier").number("output_multiplier", 1.0),
        final_logit_softcapping=optional("final_logit_softcapping"),
        dtype=dtype_name(f),
        **size,
    )
    f.refuse_rest()
    dflash.refuse_rest()
    return config
