"""Qwen3-MoE: Qwen3 attention, and experts in most layers, stored one by one or stacked."""

import dataclasses
import re
from typing import Any

from dflash_jax.config.base import (
    TargetConfig,
    dense_config,
    expert_sizes,
    extended,
    switched_window,
)
from dflash_jax.config.fields import Fields, integer
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, Typed
from dflash_jax.converters.formats.slots import (
    STACKED,
    Folder,
    Keys,
    Slot,
    TensorPart,
    linear,
    same,
)
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf
from dflash_jax.families.qwen3 import head_norms


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
    config = dense_config(f)
    layers = range(config.num_layers)
    every = f.integer("decoder_sparse_step", 1)
    dense = f.get("mlp_only_layers", [])
    listed = isinstance(dense, list) and all(type(i) is int and i in layers for i in dense)
    if every < 1 or not listed:
        raise ConfigError(
            f"{f.where}: decoder_sparse_step is {every} and mlp_only_layers {dense!r}; expected a"
            f" positive number and a list of layers from 0 to {layers[-1]}"
        )
    experts = expert_sizes(f, integer(f, "moe_intermediate_size"))
    return extended(
        config,
        Qwen3MoeConfig,
        windows=(switched_window(f),) * len(layers),
        num_experts=experts.total,
        experts_per_token=experts.chosen,
        expert_size=experts.size,
        qk_norm=True,
        sparse=tuple((i + 1) % every == 0 and i not in dense for i in layers),
        normalise_shares=f.flag("norm_topk_prob", False),
    )


def folder(_: Qwen3MoeConfig) -> Folder:
    """Expect experts that may be stacked."""
    return Folder(fused=STACKED)


def slots(config: Qwen3MoeConfig) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    slots = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i, sparse in enumerate(config.sparse):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        if sparse:
            slots += _sparse_layer(config, at, source)
        else:
            slots += llama.layer(config, i)
        slots += head_norms(config, (*at, "attention"), f"{source}self_attn.")
    return slots


def _sparse_layer(config: Qwen3MoeConfig, at: Keys, source: str) -> list[Slot]:
    width = config.hidden_size
    norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    return [
        *(same((*at, ours), f"{source}{name}.weight", width) for ours, name in norms.items()),
        *llama.attention(config, (*at, "attention"), f"{source}self_attn."),
        linear((*at, "mlp", "router"), f"{source}mlp.gate.weight", config.num_experts, width),
        *stacks(
            (*at, "mlp"), f"{source}mlp.experts.", config.num_experts, config.expert_size, width
        ),
    ]


def stacks(at: Keys, source: str, count: int, size: int, width: int) -> list[Slot]:
    """Return expert weights [E, D, 2, F] and [E, F, D] from three tensors for each expert."""
    gate_up = []
    down = []
    for e in range(count):
        for i, name in enumerate(("gate", "up")):
            weight = f"{source}{e}.{name}_proj.weight"
            gate_up.append(TensorPart(weight, (size, width), (0, 2, 3, 1), (e, i)))
        down.append(TensorPart(f"{source}{e}.down_proj.weight", (width, size), (0, 2, 1), (e,)))
    return [
        Slot((*at, "experts_gate_up"), (count, width, 2, size), tuple(gate_up), stack=True),
        Slot((*at, "experts_down"), (count, size, width), tuple(down), stack=True),
    ]


def to_hf(config: Qwen3MoeConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "Qwen3MoeForCausalLM") | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalise_shares,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(config.sparse) if not sparse],
    }


# GGUF
_ROUTER = re.compile(r"layers\.(\d+)\.mlp\.gate\.weight")
OWN = {key: value for key, value in llama.UNAPPLIED.items() if key != "expert_count"}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3-MoE.

    No key says whether chosen shares are normalised; they are in every published model.
    """
    fields.refuse_unless(OWN)
    present = set(source.names())
    width = fields.count("expert_feed_forward_length", 524288)
    hf_fields = keys.geometry(fields, inner=fields.count("feed_forward_length", 524288, width))
    sparse = [
        f"blk.{i}.ffn_gate_inp.weight" in present for i in range(hf_fields["num_hidden_layers"])
    ]
    return (
        hf_fields
        | tensors.expert_counts(fields)
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": width,
            "mlp_only_layers": [i for i, routed in enumerate(sparse) if not routed],
            "norm_topk_prob": fields.get("expert_weights_norm") is not False,
            "attention_bias": tensors.biased(source),
        }
    )


def gguf_origin(name: str, config: TargetConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one."""
    if origin := tensors.expert_origin(name, config, shapes):
        return origin
    if match := _ROUTER.fullmatch(name):
        stored = f"blk.{match[1]}.ffn_gate_inp.weight"
        return Origin(stored) if stored in shapes else None
    return tensors.origin(name, config, shapes)


def to_gguf(config: Qwen3MoeConfig) -> keys.Metadata:
    """Return the metadata that is specific to Qwen3-MoE.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(
        config,
        {
            "a sliding window": any(config.windows),
            "shares of experts that are not normalised": not config.normalise_shares,
        },
    )
    normed = {"expert_weights_norm": Typed(BOOL, True)}
    return keys.rope(config.rope) | keys.experts(config) | normed


def gguf_stored(name: str, config: Qwen3MoeConfig) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    if (stored := tensors.expert_stored(name, config)) is not None:
        return stored
    match = _ROUTER.fullmatch(name)
    return {f"blk.{match[1]}.ffn_gate_inp.weight" if match else stored_name(name): Origin(name)}


FAMILY = Family(
    config=Qwen3MoeConfig,
    from_hf=from_hf,
    model_types=("qwen3_moe",),
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
    net="dflash_jax.families.qwen3_moe_net",
    slots=slots,
    folder=folder,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("qwen3moe",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=gguf_origin,
        stored=gguf_stored,
    ),
)
