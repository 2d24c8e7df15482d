"""Granite 3.x, dense: Llama with factors of embeddings, scores, residuals and logits."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.errors import ConfigError


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Granite.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    fields = dense_fields(f) | {
        "mlp_bias": f.flag("mlp_bias", False),
        "embedding_scale": f.number("embedding_multiplier", 1.0),
        "score_scale": f.number("attention_multiplier", 1.0),
        "residual_scale": f.number("residual_multiplier", 1.0),
        "logit_divisor": f.number("logits_scaling", 1.0),
    }
    if fields["logit_divisor"] <= 0:
        raise ConfigError(f"{f.where}: logits_scaling is not positive; expected more than 0")
    return TargetConfig(**fields)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    any_width=True,
    module="llama",
    model_types=("granite",),
    gguf=("granite",),
    defaults={"granite": {"max_position_embeddings": 2048}},
)
