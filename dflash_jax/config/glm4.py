"""GLM-4 (0414), dense: partly rotated heads, and norms around attention and MLP."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.config.rope import rotated_share


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense GLM-4.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    share = rotated_share(f, 0.5)
    fields = dense_fields(f)
    return TargetConfig(
        **fields
        | {
            "rms_norm_eps": f.number("rms_norm_eps", 1.5625e-07),
            "qkv_bias": f.flag("attention_bias", True),
            "attention_bias": False,  # of the output, which has none
        },
        norm_after=True,
        rotated=int(fields["head_dim"] * share),
        rotated_neighbours=True,
    )


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    any_width=True,
    module="llama",
    model_types=("glm4",),
    gguf=("glm4",),
    defaults={
        "glm4": {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128}
    },
)
