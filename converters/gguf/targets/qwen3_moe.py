"""Qwen3-MoE: as Qwen3, with stacked experts; layers without a router are dense."""

import re
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf.fields import Fields, geometry
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.targets import dense, experts
from dflash_jax.converters.gguf.targets.llama import UNAPPLIED

OWN = {key: value for key, value in UNAPPLIED.items() if key != "expert_count"}


def hf_fields(fields: Fields, source: GgufFile) -> dict[str, Any]:
    """The fields of config.json that are Qwen3-MoE's own.

    No key tells whether the chosen shares are made to sum to 1; every published model does.
    """
    fields.refuse_unless(OWN)
    present = set(source.names())
    width = fields.count("expert_feed_forward_length", 524288)
    found = geometry(fields, inner=fields.count("feed_forward_length", 524288, width))
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in present for i in range(found["num_hidden_layers"])]
    return (
        found
        | experts.counts(fields)
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": width,
            "mlp_only_layers": [i for i, routed in enumerate(sparse) if not routed],
            "norm_topk_prob": fields.get("expert_weights_norm") is not False,
            "attention_bias": not present.isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        }
    )


def origin(name: str, config: TargetConfig, shapes: dense.Shapes) -> Origin | None:
    """Where a canonical tensor lies."""
    if found := experts.origin(name, config, shapes):
        return found
    if match := re.fullmatch(r"layers\.(\d+)\.mlp\.gate\.weight", name):
        stored = f"blk.{match[1]}.ffn_gate_inp.weight"
        return Origin(stored) if stored in shapes else None
    return dense.origin(name, config, shapes)


def ignored(name: str, config: TargetConfig) -> str | None:
    """No tensor is superfluous."""
    return None
