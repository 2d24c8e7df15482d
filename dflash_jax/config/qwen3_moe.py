"""Qwen3-MoE: Qwen3 attention, and experts in most layers."""

import dataclasses

from dflash_jax.config.base import TargetConfig, dense_fields, expert_fields, switched_window
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(TargetConfig):
    """A Qwen3-MoE target; `intermediate_size` is of its dense layers."""

    sparse: tuple[bool, ...]  # per layer: whether it has experts instead of one MLP
    normalise_shares: bool  # whether the chosen experts' weights are made to sum to 1


def from_hf(f: Fields) -> Qwen3MoeConfig:
    """Return the config of a Qwen3-MoE; if its window is switched on, all layers have it.

    As in transformers, `layer_types` and `max_window_layers` do not change that.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("qkv_bias", False)
    f.must_be("use_qk_norm", True)
    f.must_be("shared_expert_intermediate_size", 0)
    fields = dense_fields(f)
    layers = range(fields["num_layers"])
    every, dense = f.integer("decoder_sparse_step", 1), f.get("mlp_only_layers", [])
    listed = isinstance(dense, list) and all(type(i) is int and i in layers for i in dense)
    if every < 1 or not listed:
        raise ConfigError(
            f"{f.where}: decoder_sparse_step is {every} and mlp_only_layers {dense!r}; expected a"
            f" positive number and a list of layers from 0 to {layers[-1]}"
        )
    return Qwen3MoeConfig(
        **fields | {"windows": (switched_window(f),) * len(layers)},
        **expert_fields(f, integer(f, "moe_intermediate_size")),
        qk_norm=True,
        sparse=tuple((i + 1) % every == 0 and i not in dense for i in layers),
        normalise_shares=f.flag("norm_topk_prob", False),
    )


FAMILY = Family(
    config=Qwen3MoeConfig,
    from_hf=from_hf,
    any_width=True,
    model_types=("qwen3_moe",),
    gguf=("qwen3moe",),
    defaults={
        "qwen3_moe": {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
    },
    optional_window=True,
)
