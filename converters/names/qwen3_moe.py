"""Qwen3-MoE: as Qwen3, with experts in most layers; stored one by one or stacked."""

from dflash_jax.config.qwen3_moe import Qwen3MoeConfig
from dflash_jax.converters.names import llama
from dflash_jax.converters.names.qwen3 import head_norms
from dflash_jax.converters.names.slots import STACKED, Folder, Part, Path, Slot, linear, same


def folder(_: Qwen3MoeConfig) -> Folder:
    """Experts may be stacked."""
    return Folder(fused=STACKED)


def slots(config: Qwen3MoeConfig) -> list[Slot]:
    """Every parameter of the target."""
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
