"""OLMo 2: norms after attention and MLP instead of before, and over all queries or keys."""

from dflash_jax.config.base import TargetConfig, dense_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of an OLMo 2."""
    fields = dense_fields(f) | {"rms_norm_eps": f.number("rms_norm_eps", 1e-5)}
    return TargetConfig(**fields, joint_norm=True, norm_before=False, norm_after=True)


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    any_width=True,
    model_types=("olmo2",),
    gguf=("olmo2",),
    defaults={"olmo2": {"max_position_embeddings": 2048}},
)
