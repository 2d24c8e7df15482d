"""Llama 3.x."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Llama, with full attention in all layers.

    Windows, which some files converted from other families have, are ignored as in transformers.
    """
    fields = dense_fields(f) | {"mlp_bias": f.flag("mlp_bias", False)}
    return TargetConfig(**fields | {"windows": (None,) * fields["num_layers"]})


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    any_width=True,
    model_types=("llama",),
    gguf=("llama",),
    defaults={"llama": {"max_position_embeddings": 2048}},
)
