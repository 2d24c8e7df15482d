"""Qwen2 and Qwen2.5, dense: Llama with biases of queries, keys and values."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Qwen2; the output of attention never has a bias."""
    return TargetConfig(**dense_fields(f) | {"attention_bias": False}, qkv_bias=True)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    module="llama",
    any_width=True,
    model_types=("qwen2",),
    gguf=("qwen2",),
    defaults={
        "qwen2": {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
        }
    },
    optional_window=True,
)
