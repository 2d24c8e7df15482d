"""Byte and operation counts of a plan, by arithmetic: nothing is allocated to know them."""

import dataclasses
import math
from typing import TYPE_CHECKING

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig

if TYPE_CHECKING:
    from dflash_jax.compiler.plan import Plan

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes on the device."""

    weights: int
    caches: int
    temporaries: int  # an upper estimate for the widest program

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.temporaries

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"total": self.total}
        return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts.items())


def layer_weights(c: AttentionConfig, *, qk_norm: bool) -> int:
    """Parameters of one decoder layer."""
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    attention = c.hidden_size * (heads + c.num_heads * c.head_dim)
    bias = (heads + c.hidden_size) if c.attention_bias else 0
    norms = 2 * c.hidden_size + (2 * c.head_dim if qk_norm else 0)
    return attention + bias + norms + 3 * c.hidden_size * c.intermediate_size


def target_weights(c: TargetConfig) -> int:
    """Parameters of a dense target."""
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return tables + c.hidden_size + c.num_layers * layer_weights(c, qk_norm=c.qk_norm)


def drafter_weights(c: DrafterConfig) -> int:
    """Parameters of a DFlash v1 drafter (published totals: Qwen3-8B-b16 has 1,048,626,432)."""
    fused = len(c.target_layer_ids) * c.hidden_size**2 + 2 * c.hidden_size
    return fused + c.num_layers * layer_weights(c, qk_norm=True)


def cache_bytes(
    plan: "Plan", c: AttentionConfig, windows: tuple[int | None, ...], item: int
) -> int:
    """Keys and values of all layers and rows."""
    slots = sum(plan.ring_slots(w) or plan.slots for w in windows or (None,) * c.num_layers)
    return 2 * plan.rows * c.num_kv_heads * c.head_dim * slots * item


def temporary_bytes(plan: "Plan", target: TargetConfig, drafter: DrafterConfig | None) -> int:
    """Upper estimate: one layer's scores and activations, the head's logits, the taps."""
    item = ITEM[plan.dtype]
    wide = plan.rows * plan.widest
    scores = 3 * 4 * wide * target.num_heads * plan.slots
    hidden = 8 * item * wide * (target.hidden_size + target.intermediate_size)
    logits = 4 * 4 * plan.rows * (plan.block) * target.vocab_size
    taps = item * wide * target.hidden_size * (len(drafter.target_layer_ids) if drafter else 0)
    return scores + hidden + logits + 2 * taps


def budget(plan: "Plan", target: TargetConfig, drafter: DrafterConfig | None) -> Budget:
    """What a resolved plan needs for these models."""
    item = ITEM[plan.dtype]
    weights = target_weights(target)
    caches = cache_bytes(plan, target, target.windows, item)
    if drafter is not None:
        weights += drafter_weights(drafter)
        caches += cache_bytes(plan, drafter, drafter.windows, item)
    return Budget(weights * item, caches, temporary_bytes(plan, target, drafter))


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must at least move and multiply."""

    bytes: int  # weights once, plus the caches it reads
    flops: int


def work(plan: "Plan", target: TargetConfig, drafter: DrafterConfig | None, program: str) -> Work:
    """Least bytes and operations of a program of `declare`, caches counted at full capacity."""
    item = ITEM[plan.dtype]
    name = program.removesuffix("_sampled")
    width = {"prefill": plan.chunk, "plain1": 1}.get(name, plan.block)
    tokens = plan.rows * width
    head = target.vocab_size * target.hidden_size
    head_rows = plan.rows if name == "prefill" else tokens
    body = target.num_layers * layer_weights(target, qk_norm=target.qk_norm)
    moved = (body + head) * item + cache_bytes(plan, target, target.windows, item)
    flops = 2 * (body * tokens + head * head_rows) + _attention_flops(plan, target, tokens)
    if drafter is not None:
        context = drafter.hidden_size**2 * len(drafter.target_layer_ids)
        kv = 2 * drafter.hidden_size * drafter.num_kv_heads * drafter.head_dim
        context += drafter.num_layers * kv
        moved, flops = moved + context * item, flops + 2 * context * tokens
        if name == "speculative":
            layers = drafter_weights(drafter) - context
            moved += (layers + head) * item + cache_bytes(plan, drafter, drafter.windows, item)
            flops += 2 * (layers + head) * tokens + _attention_flops(plan, drafter, tokens)
    return Work(moved, flops)


def _attention_flops(plan: "Plan", c: AttentionConfig, tokens: int) -> int:
    return 4 * c.num_layers * tokens * c.num_heads * c.head_dim * plan.slots


def gibi(n: float) -> str:
    """A byte count for people."""
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return f"{n / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
