"""Qwen3-MoE: Qwen3 with experts in most layers, stored one by one or stacked."""

import re
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.config.qwen3_moe import Qwen3MoeConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.families import llama
from dflash_jax.converters.families.llama import UNAPPLIED
from dflash_jax.converters.families.qwen3 import head_norms
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.tensors import stored_name
from dflash_jax.converters.gguf.writer import BOOL, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import STACKED, Folder, Keys, Slot, TensorPart, linear, same


def folder(_: Qwen3MoeConfig) -> Folder:
    """Expect experts that may be stacked."""
    return Folder(fused=STACKED)


def slots(config: Qwen3MoeConfig) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    found = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i, sparse in enumerate(config.sparse):
        at, source = (f"layers_{i}",), f"layers.{i}."
        if sparse:
            found += _sparse_layer(config, at, source)
        else:
            found += llama.layer(config, i)
        found += head_norms(config, (*at, "attention"), f"{source}self_attn.")
    return found


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
    gate_up, down = [], []
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
    return published.decoder_fields(config, dtype, "Qwen3MoeForCausalLM") | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalise_shares,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(config.sparse) if not sparse],
    }


# GGUF
_ROUTER = re.compile(r"layers\.(\d+)\.mlp\.gate\.weight")
OWN = {key: value for key, value in UNAPPLIED.items() if key != "expert_count"}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3-MoE.

    No key says whether chosen shares are normalised; they are in every published model.
    """
    fields.refuse_unless(OWN)
    present = set(source.names())
    width = fields.count("expert_feed_forward_length", 524288)
    found = geometry(fields, inner=fields.count("feed_forward_length", 524288, width))
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in present for i in range(found["num_hidden_layers"])]
    return (
        found
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
    if found := tensors.expert_origin(name, config, shapes):
        return found
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
    if (found := tensors.expert_stored(name, config)) is not None:
        return found
    match = _ROUTER.fullmatch(name)
    return {f"blk.{match[1]}.ffn_gate_inp.weight" if match else stored_name(name): Origin(name)}
