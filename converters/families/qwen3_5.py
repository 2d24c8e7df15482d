"""Qwen3.5 and Qwen3.6: recurrent layers and gated attention; the larger models have experts."""

from typing import Any

from dflash_jax.config import FULL, LINEAR, HybridConfig
from dflash_jax.converters.families import llama
from dflash_jax.converters.families.qwen3 import head_norms
from dflash_jax.converters.families.qwen3_moe import stacks
from dflash_jax.converters.gguf import qwen3_5 as gguf_form
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import (
    STACKED,
    Folder,
    Keys,
    Slot,
    TensorPart,
    by_head,
    linear,
    paired,
    same,
)
from dflash_jax.errors import ConfigError

ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
OTHERS = {
    r"^visual\.": "vision: only text is run",
    r"^mtp\.": "multi-token prediction: not run",
}


def folder(_: HybridConfig) -> Folder:
    """Expect vision weights, and experts that may be stacked."""
    return Folder(ignored=OTHERS, fused=STACKED)


def slots(config: HybridConfig) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    found = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i, recurrent in enumerate(config.recurrent):
        at, source = (f"layers_{i}",), f"layers.{i}."
        found.append(same((*at, "input_norm"), f"{source}input_layernorm.weight", width))
        if recurrent:
            found += _delta(config, (*at, "delta"), f"{source}linear_attn.")
        else:
            found += _attention(config, (*at, "attention"), f"{source}self_attn.")
        second = _experts if config.num_experts else llama.norm_and_mlp
        found += second(config, at, source)
    return found


def _attention(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return attention; queries and gates alternate by head, as in the stored tensor."""
    width, groups, head = config.hidden_size, config.num_kv_heads, config.head_dim
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv")
    count = (2 * config.num_heads // groups, 1, 1)
    found = [
        by_head((*at, "qkv"), names, count, groups, head, width),
        linear((*at, "o"), f"{source}o_proj.weight", width, config.num_heads * head),
        *head_norms(config, at, source),
    ]
    if config.attention_bias:
        biases = tuple(f"{source}{x}_proj.bias" for x in "qkv")
        found.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
        found.append(same((*at, "o_bias"), f"{source}o_proj.bias", width))
    return found


def _delta(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return a recurrent layer: the four input projections joined, the others as stored."""
    width, heads = config.hidden_size, config.value_heads
    values, channels = heads * config.value_width, config.conv_channels
    sizes = {"qkv": channels, "z": values, "b": heads, "a": heads}
    parts, start = [], 0
    for name, size in sizes.items():
        select = (slice(start, start + size),)
        parts.append(TensorPart(f"{source}in_proj_{name}.weight", (size, width), (1, 0), select))
        start += size
    kernel = config.conv_kernel
    conv = TensorPart(f"{source}conv1d.weight", (channels, 1, kernel), (1, 0))
    return [
        Slot((*at, "in_proj"), (width, start), tuple(parts)),
        Slot((*at, "conv"), (kernel, channels), (conv,)),
        same((*at, "a_log"), f"{source}A_log", heads),
        same((*at, "dt_bias"), f"{source}dt_bias", heads),
        same((*at, "norm"), f"{source}norm.weight", config.value_width),
        linear((*at, "out"), f"{source}out_proj.weight", width, values),
    ]


def _experts(config: HybridConfig, at: Keys, source: str) -> list[Slot]:
    """Return the second norm, the router, the experts and the shared expert."""
    width, size, shared = config.hidden_size, config.expert_size, config.shared_expert_size
    count, mlp = config.num_experts, f"{source}mlp."
    norm = f"{source}post_attention_layernorm.weight"
    both = (f"{mlp}shared_expert.gate_proj.weight", f"{mlp}shared_expert.up_proj.weight")
    at_mlp = (*at, "mlp")
    return [
        same((*at, "post_attention_norm"), norm, width),
        linear((*at_mlp, "router"), f"{mlp}gate.weight", count, width),
        *stacks(at_mlp, f"{mlp}experts.", count, size, width),
        linear((*at_mlp, "shared_gate"), f"{mlp}shared_expert_gate.weight", 1, width),
        paired((*at_mlp, "shared", "gate_up"), both, shared, width),
        linear((*at_mlp, "shared", "down"), f"{mlp}shared_expert.down_proj.weight", width, shared),
    ]


def to_hf(config: HybridConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone, as transformers spells it.

    Raises:
      ConfigError: the rotary embedding is rescaled.
    """
    if config.rope.kind != "default":
        raise ConfigError(
            f"rotary embedding rescaled by {config.rope.kind!r} is not written for Qwen3.5; export"
            " the weights before a context extension"
        )
    found = published.shared_fields(config, dtype, ARCHITECTURES[config.model_type]) | {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in config.recurrent],
        "linear_num_key_heads": config.key_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.key_width,
        "linear_value_head_dim": config.value_width,
        "linear_conv_kernel_dim": config.conv_kernel,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
        },
    }
    return found | _mlp_fields(config)


def _mlp_fields(config: HybridConfig) -> dict[str, Any]:
    if not config.num_experts:
        return {"intermediate_size": config.intermediate_size}
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_expert_size,
    }


# GGUF
GGUF_ARCHITECTURES, mrope_sections = gguf_form.GGUF_ARCHITECTURES, gguf_form.mrope_sections
from_gguf, to_gguf = gguf_form.from_gguf, gguf_form.to_gguf
gguf_origin, gguf_stored = gguf_form.gguf_origin, gguf_form.gguf_stored
gguf_ignored = gguf_form.gguf_ignored
