"""Metadata and tensor names of a drafter in llama.cpp's `dflash` architecture."""

import numpy as np

from dflash_jax.config import SLIDING, DrafterConfig
from dflash_jax.converters import families
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf import keys
from dflash_jax.converters.gguf.drafter import aliases
from dflash_jax.converters.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.errors import ConfigError


def origins(config: DrafterConfig) -> dict[str, Origin]:
    """Return the tensors of a drafter file, by their upstream names."""
    return {
        aliases(part.name)[0]: _ids(part.shape) if part.name == "d2t" else Origin(part.name)
        for slot in families.slots(config)
        for part in slot.parts
    }


def _ids(shape: tuple[int, ...]) -> Origin:
    """Return the token of each row of a reduced head, from offsets."""
    order = np.arange(shape[0], dtype=np.int64).reshape(-1, 1)
    return Origin("d2t", values=lambda offsets: offsets + order, reshaped=shape)


def metadata(config: DrafterConfig, *, mrope: bool = False) -> keys.Metadata:
    """Return the keys of a drafter file below its architecture's prefix.

    Args:
      mrope: whether the target has several position rows; the drafter rotates by the first.

    Raises:
      ConfigError: the drafter has no form in GGUF.
    """
    if config.draft_vocab_size and not config.own_head:
        raise ConfigError("a reduced vocabulary without its own head has no form in GGUF")
    own = keys.shared(config) | {
        "context_length": Typed(U32, config.rope.original_length or 4096),
        "vocab_size": Typed(U32, config.vocab_size),
        "block_size": Typed(U32, config.block_size),
        "target_layers": Typed(I32, [i + 1 for i in config.target_layer_ids]),
    }
    own |= keys.rope(config.rope) | _attention(config) | _scales(config)
    if mrope:
        own["rope.dimension_sections"] = Typed(I32, [config.head_dim // 2, 0, 0, 0])
    return own | families.provided(config.kind, "to_gguf")(config)


def _attention(config: DrafterConfig) -> keys.Metadata:
    """Return windows, and as upstream does, causality only if the layers do not imply it."""
    fields = published.drafter_fields(config, "float32")
    found = {}
    if fields["sliding_window"] is not None:
        pattern = [kind == SLIDING for kind in fields["layer_types"]]
        found["attention.sliding_window"] = Typed(U32, fields["sliding_window"])
        found["attention.sliding_window_pattern"] = Typed(BOOL, pattern)
    elif SLIDING in fields["layer_types"]:
        raise ConfigError("causal and other layers without a window have no form in a drafter GGUF")
    if "is_causal" in fields:
        found["attention.causal"] = Typed(BOOL, fields["is_causal"])
    return found


def _scales(config: DrafterConfig) -> keys.Metadata:
    own = published.drafter_fields(config, "float32")["dflash_config"]
    named = {
        "input_embedding_scale": "embedding_scale",
        "output_multiplier": "logit_scale",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {named[k]: Typed(F32, own[k]) for k in named if k in own}
