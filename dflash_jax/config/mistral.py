"""Mistral and Ministral: Llama with a window in all layers, in some, or in none."""

from dflash_jax.config.base import TargetConfig, dense_fields, switched_window
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields

_SIZES = {
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "num_key_value_heads": 8,
}


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a Mistral; only Ministral's layers may differ, by `layer_types`."""
    fields = dense_fields(f)
    if fields["model_type"] == "mistral" or f.get("layer_types") is None:
        fields["windows"] = (switched_window(f),) * fields["num_layers"]
    return TargetConfig(**fields)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    module="llama",
    any_width=True,
    model_types=("mistral", "ministral"),
    defaults={"mistral": _SIZES, "ministral": _SIZES},
)
