"""Qwen3-MoE: as Qwen3, with experts in most layers; stored one by one or stacked."""

import re

import numpy as np

from converters.canonical import Canonical, Origin
from converters.names import llama
from converters.names.qwen3 import head_norms
from converters.names.slots import Part, Path, Slot, linear, same
from dflash_jax.config.qwen3_moe import Qwen3MoeConfig
from dflash_jax.errors import CheckpointError

_STACK = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")


def slots(config: Qwen3MoeConfig) -> list[Slot]:
    """Every parameter of the target."""
    width, vocab = config.hidden_size, config.vocab_size
    found = [
        same(("embed",), "embed_tokens.weight", vocab, width),
        same(("norm",), "norm.weight", width),
    ]
    for i, sparse in enumerate(config.sparse):
        at, source = (f"layers_{i}",), f"layers.{i}."
        if sparse:
            found += _sparse_layer(config, at, source)
        else:
            found += llama.layer(config, i)
        found += head_norms(config, (*at, "attention"), f"{source}self_attn.")
    if not config.tie_embeddings:
        found.append(linear(("head",), "lm_head.weight", vocab, width))
    return found


def _sparse_layer(config: Qwen3MoeConfig, at: Path, source: str) -> list[Slot]:
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


def stacks(at: Path, source: str, experts: int, size: int, width: int) -> list[Slot]:
    """The experts' weights [E, D, 2, F] and [E, F, D] from three tensors for each expert."""
    gate_up, down = [], []
    for e in range(experts):
        for i, name in enumerate(("gate", "up")):
            weight = f"{source}{e}.{name}_proj.weight"
            gate_up.append(Part(weight, (size, width), (0, 2, 3, 1), (e, i)))
        down.append(Part(f"{source}{e}.down_proj.weight", (width, size), (0, 2, 1), (e,)))
    return [
        Slot((*at, "experts_gate_up"), (experts, width, 2, size), tuple(gate_up)),
        Slot((*at, "experts_down"), (experts, size, width), tuple(down)),
    ]


def unstacked(found: Canonical) -> Canonical:
    """Stacks `experts.gate_up_proj` [E, 2F, D], gates first, and `down_proj` seen one by one."""
    origins: dict[str, Origin] = {}
    for name, origin in found.origins.items():
        match = _STACK.fullmatch(name)
        shape = found.shape(name)
        if match is None:
            origins[name] = origin
            continue
        halves = {"gate_up": ("gate", "up"), "down": ("down",)}[match[2]]
        if len(shape) != 3 or shape[1] % len(halves):
            raise CheckpointError(
                f"{origin.name} has shape {list(shape)}; expected experts, rows and columns, the"
                " rows of gate and up one after the other"
            )
        height = shape[1] // len(halves)
        starts = (np.arange(shape[0] * len(halves)) * height).reshape(shape[0], len(halves))
        for e, i in np.ndindex(starts.shape):
            rows = starts[e, i] + np.arange(height)
            origins[f"{match[1]}.{e}.{halves[i]}_proj.weight"] = Origin(origin.name, rows)
    return Canonical(found.source, origins, found.ignored)
