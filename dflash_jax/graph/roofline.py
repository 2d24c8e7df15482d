"""Minimum time of a program: bytes over bandwidth, operations over peak.

The table of devices has sustained rates where they are known, and otherwise those of data sheets.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.keys import Step
from dflash_jax.graph.memory import TargetSizes, parameters, sizes_of, tree_bytes, weight_bytes
from dflash_jax.kernels.caches import LayerCache, RecurrentCache
from dflash_jax.plan import ResolvedPlan


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Minimum bytes and operations of one call.

    Attributes:
      bytes: weights once, the caches that the call reads, the recurrent states that it writes.
      flops: floating-point operations.
    """

    bytes: int
    flops: int


def work(planned: PlannedPair, step: Step) -> StepWork:
    """Return the minimum work of a prefill, plain or speculative step with full caches."""
    of_target = _target_work(planned, step)
    if planned.pair.drafter is None:
        return of_target
    of_drafter = _drafter_work(planned, step)
    return StepWork(of_target.bytes + of_drafter.bytes, of_target.flops + of_drafter.flops)


def _call_size(plan: ResolvedPlan, step: Step) -> tuple[int, int]:
    """Return the rows of a call, and the tokens of each."""
    if step == Step.PREFILL:
        return plan.prefill_rows, plan.chunk
    return plan.rows, plan.plain_width if step == Step.PLAIN else plan.block


def _head_sizes(planned: PlannedPair) -> tuple[int, int]:
    """Return the numbers of the target's head, and its bytes."""
    sizes = sizes_of(planned.config)
    count = sizes.vocab_size * sizes.hidden_size
    floats = count * jnp.dtype(planned.plan.dtype).itemsize
    return count, weight_bytes(planned)["target"].get("head", floats)


def _target_work(planned: PlannedPair, step: Step) -> StepWork:
    """Return the work of the target's forward pass; a prefill computes the last logits only."""
    plan = planned.plan
    state = planned.state
    target = sizes_of(planned.config)
    rows, width = _call_size(plan, step)
    tokens = rows * width
    head_tokens = rows if step == Step.PREFILL else tokens
    counts = parameters(planned)["target"]
    sizes = weight_bytes(planned)["target"]
    head_count, head_bytes = _head_sizes(planned)
    unused_by_one, _ = _idle_experts(target, counts, tokens)
    _, unread = _idle_experts(target, sizes, tokens)
    recurrent = [cache for cache in state.target if isinstance(cache, RecurrentCache)]
    moved = _multiplied(sizes) - unread + head_bytes
    moved += (tree_bytes(state.target) + tree_bytes(recurrent)) * rows // plan.rows
    flops = 2 * ((_multiplied(counts) - unused_by_one) * tokens + head_count * head_tokens)
    flops += _attention_flops(state.target, tokens, target.num_heads)
    states = sum(cache.state.size for cache in recurrent) * rows // plan.rows
    flops += 7 * width * states  # decay, read, correct, read out
    return StepWork(moved, flops)


def _drafter_work(planned: PlannedPair, step: Step) -> StepWork:
    """Return the work of the drafter: its context of all tokens, and in drafted steps a block."""
    rows, width = _call_size(planned.plan, step)
    tokens = rows * width
    counts = parameters(planned)["drafter"]
    sizes = weight_bytes(planned)["drafter"]
    context_count = _context_weights(counts)
    if step != Step.SPECULATIVE:
        return StepWork(_context_weights(sizes), 2 * tokens * context_count)
    head_count, head_bytes = _head_sizes(planned)
    state = planned.state.drafter
    moved = _multiplied(sizes) + sizes.get("head", head_bytes) + tree_bytes(state)
    used = _multiplied(counts) + counts.get("head", head_count)
    flops = 2 * tokens * (used + context_count)
    config = getattr(planned.pair.drafter, "config", None)
    flops += _attention_flops(state, tokens, getattr(config, "num_heads", 1))
    return StepWork(moved, flops)


def _context_weights(counts: dict[str, int]) -> int:
    """Return the sum over the weights that make a drafter's context of taps."""
    return sum(count for path, count in counts.items() if path.endswith(("fc", "kv")))


def _multiplied(counts: dict[str, int]) -> int:
    """Return the sum over the weights that every token is multiplied with.

    These are all matrices except the head and gathered tables.
    """
    tables = ("embed", "head", "layer_embed", "predecessor", "successor", "markov_w1", "d2t")
    return sum(count for path, count in counts.items() if path not in tables)


def _idle_experts(target: TargetSizes, counts: dict[str, int], tokens: int) -> tuple[int, int]:
    """Return the sums over experts that one token does not use, and that all do not use.

    The second depends on the routing; it is counted for tokens that share as few experts as
    possible.
    """
    if not target.num_experts:
        return 0, 0
    total = sum(count for path, count in counts.items() if "/experts_" in path)
    each = total // target.num_experts
    used = min(target.num_experts, tokens * target.experts_per_token)
    unused_by_one = each * (target.num_experts - target.experts_per_token)
    return unused_by_one, each * (target.num_experts - used)


def _attention_flops(caches: Any, tokens: int, num_heads: int) -> int:
    """Count attention scores and weighted sums over every cache."""
    nodes = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, LayerCache))
    sizes = sum(x.slots * x.k.shape[3] for x in nodes if isinstance(x, LayerCache))
    return 4 * tokens * num_heads * sizes


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of a device."""

    name: str
    platform: str  # JAX's name: "cpu", "gpu" or "tpu"
    bytes_per_s: float  # reads and writes together
    flops_per_s: dict[str, float]  # by dtype
    memory: int  # bytes
    source: str  # where the rates are from


def _device(name: str, tb_s: float, tflops: float, gib: float, f32: float) -> Device:
    half = tflops * 1e12
    rates = {"bfloat16": half, "float16": half, "float32": half * f32}
    platform = "cpu" if name == "CPU" else "tpu" if name in TPUS else "gpu"
    source = _SOURCES.get(name, "assumed")
    return Device(name, platform, tb_s * 1e12, rates, int(gib * 2**30), source)


# Names of TPUs, and those that JAX gives to their devices.
TPUS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}

# TB/s, TFLOP/s in half precision, GiB, and how much of that rate float32 reaches. H200: copy
# bandwidth and GEMM rate measured; other GPUs without a source 0.9 and 0.8 of their data sheets.
# TPUs multiply float32 in six passes of bfloat16.
_RATES = {
    "H200": (4.3, 790, 139, 0.06),
    "H100": (3.0, 790, 78, 0.06),
    "B200": (8.0, 2250, 178, 0.03),
    "A100": (1.8, 250, 78, 0.06),
    "L40S": (0.78, 290, 44, 0.2),
    "RTX 4090": (0.9, 130, 23, 0.5),
    "RTX 3090": (0.84, 57, 23, 0.5),
    "v5e": (0.819, 197, 15.75, 1 / 6),
    "v5p": (2.765, 459, 95, 1 / 6),
    "v6e": (1.638, 918, 31.25, 1 / 6),
    "CPU": (0.04, 0.2, 16, 1.0),
}
_SOURCES = {
    "B200": "peak, NVIDIA HGX B200 data sheet",
    **{name: f"peak, docs.cloud.google.com/tpu/docs/{name}" for name in TPUS},
}
DEVICES = {name: _device(name, *rates) for name, rates in _RATES.items()}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Minimum time of one call on a device."""

    seconds: float
    bound: str  # "memory" or "compute"


def roofline(work: StepWork, device: Device, dtype: str) -> Roofline:
    """Return max(bytes / bandwidth, operations / peak) and which of the two it is."""
    moving = work.bytes / device.bytes_per_s
    computing = work.flops / device.flops_per_s[dtype]
    return Roofline(max(moving, computing), "memory" if moving >= computing else "compute")


def find_device(kind: str) -> Device:
    """Return the table's entry for a JAX device kind or a name, or the CPU entry."""
    names = [name for name, of_jax in TPUS.items() if of_jax == kind]
    names += [name for name in DEVICES if name.lower() in kind.lower()]
    return DEVICES[names[0]] if names else DEVICES["CPU"]
