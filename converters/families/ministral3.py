"""Ministral 3: the tensors of Llama, and queries that grow with the position."""

import dataclasses
import math
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.config.ministral3 import GROWTH
from dflash_jax.converters.families.llama import UNAPPLIED, gguf_origin, gguf_stored, slots
from dflash_jax.converters.gguf import keys
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.writer import F32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Folder

__all__ = ["folder", "from_gguf", "gguf_origin", "gguf_stored", "slots", "to_gguf", "to_hf"]

OTHERS = {r"^(vision_tower|multi_modal_projector)\.": "vision: only text is run"}
ORIGINAL = "original_max_position_embeddings"


def folder(_: TargetConfig) -> Folder:
    """Expect vision weights."""
    return Folder(ignored=OTHERS)


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone."""
    found = published.decoder_fields(config, dtype, "Ministral3ForCausalLM")
    for key in ("rope_theta", "rope_scaling", "use_sliding_window", "layer_types"):
        del found[key]
    own = {GROWTH: config.query_growth, ORIGINAL: config.rope.original_length}
    return found | {"rope_parameters": published.rope_parameters(config.rope) | own}


# GGUF
SCALE, LENGTH = "attention.temperature_scale", "rope.scaling.original_context_length"
SHARE = "rope.scaling.yarn_log_multiplier"  # of yarn's growth that its attention factor leaves out


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Ministral 3."""
    fields.refuse_unless(UNAPPLIED)
    found, growth = geometry(fields), fields.number(SCALE, 0.0)
    scaling = found["rope_scaling"] or {"rope_type": "default"}
    if growth or fields.get(LENGTH):
        scaling[ORIGINAL] = fields.count(LENGTH, 1 << 24)
    if share := fields.number(SHARE, 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": share}
    return found | {"model_type": "ministral3", "rope_scaling": scaling | {GROWTH: growth}}


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Ministral 3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    rope, own = config.rope, {}
    if rope.kind == "yarn" and rope.attention_factor == 1:
        own[SHARE] = Typed(F32, 1.0)
        usual = 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
        rope = dataclasses.replace(rope, attention_factor=usual)
    if config.query_growth:
        own |= {
            SCALE: Typed(F32, config.query_growth),
            LENGTH: Typed(U32, rope.original_length),
        }
    return keys.rope(rope) | own
