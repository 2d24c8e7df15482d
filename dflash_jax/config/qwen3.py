"""Qwen3, dense."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Qwen3."""
    f.must_be("use_qk_norm", True)
    return TargetConfig(**dense_fields(f), qk_norm=True)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    module="llama",
    any_width=True,
    model_types=("qwen3",),
    gguf=("qwen3",),
    defaults={
        "qwen3": {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
            "head_dim": 128,
        }
    },
    optional_window=True,
)
