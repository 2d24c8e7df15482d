"""Qwen3-Next and Qwen3-Coder-Next: the layers of Qwen3.5 with experts."""

import dataclasses

from dflash_jax.config import qwen3_5
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.config.qwen3_5 import HybridConfig

KIND, ALIKE = "qwen3_next", "qwen3_5_moe_text"
# Values of absent fields that differ from Qwen3.5's.
DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10}


def from_hf(f: Fields) -> HybridConfig:
    """Return the config of a Qwen3-Next; the width of dense MLPs, which no layer has, is ignored.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("use_sliding_window", False)
    given = {name: value for name, value in f.values.items() if value is not None}
    given.pop("use_sliding_window", None)
    reader = Fields(DEFAULTS | given | {"model_type": ALIKE}, f.where)
    config = qwen3_5.from_hf(reader)
    f.used.update(reader.used)
    return dataclasses.replace(config, model_type=KIND)


FAMILY = Family(
    config=HybridConfig,
    from_hf=from_hf,
    module="qwen3_5",
    model_types=(KIND,),
    gguf=("qwen3next",),
)
