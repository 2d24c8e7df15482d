"""gpt-oss: biases everywhere, attention sinks, every second layer sliding, experts in all."""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_fields, expert_fields
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.errors import ConfigError

# Values of absent fields in transformers that differ from those of other families.
DEFAULTS = {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64}
SWIGLU_ALPHA = 1.702  # of published models
PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(TargetConfig):
    """A gpt-oss target.

    Attributes:
      swiglu_limit: clamps the experts' gate and up projections.
      swiglu_alpha: factor inside the sigmoid of the gate.
    """

    swiglu_limit: float = 7.0
    swiglu_alpha: float = SWIGLU_ALPHA

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        return ("biases", "attention sinks", f"experts clamped at {self.swiglu_limit:g}")


def from_hf(f: Fields) -> GptOssConfig:
    """Return the config of a gpt-oss; without `layer_types`, even layers are sliding.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("use_sliding_window", True)
    absent: dict[str, Any] = {
        key: value for key, value in DEFAULTS.items() if f.values.get(key) is None
    }
    if not f.values.get("rope_scaling") and f.values.get("rope_parameters") is None:
        absent["rope_parameters"] = PUBLISHED_ROPE
    read = Fields(f.values | absent, f.where)
    fields = dense_fields(read)
    window = integer(read, "sliding_window")
    f.used.update(read.used)
    if f.get("layer_types") is None:
        alternate = ((window, None)[i % 2] for i in range(fields["num_layers"]))
        fields["windows"] = tuple(alternate)
    if fields["rope"].kind == "yarn":
        f.must_be("initial_context_length", fields["rope"].original_length)
    f.used.add("initial_context_length")
    experts = expert_fields(f, fields["intermediate_size"])
    f.must_be("experts_per_token", experts["experts_per_token"])
    limit = f.number("swiglu_limit", 7.0)
    if limit <= 0:
        raise ConfigError(f"{f.where}: swiglu_limit is {limit}; expected a positive number")
    alpha = f.number("swiglu_alpha", SWIGLU_ALPHA)
    return GptOssConfig(**fields, **experts, swiglu_limit=limit, swiglu_alpha=alpha)


FAMILY = Family(
    config=GptOssConfig,
    from_hf=from_hf,
    any_width=True,
    model_types=("gpt_oss",),
    gguf=("gpt-oss",),
    defaults={
        "gpt_oss": {
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        }
    },
)
