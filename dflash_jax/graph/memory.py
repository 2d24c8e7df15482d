"""Bytes, operations and minimum times of a plan, from abstract shapes; nothing is allocated."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.graph.keys import Step
from dflash_jax.kernels.caches import LayerCache, RecurrentCache
from dflash_jax.quant.layouts import StructuredWeight


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes on the device."""

    weights: int
    caches: int
    temporaries: int  # an upper estimate for the widest program
    prefixes: int = 0  # maximum size of the prefix cache

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.caches + self.temporaries + self.prefixes

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"total": self.total}
        shown = {name: size for name, size in parts.items() if size or name != "prefixes"}
        return ", ".join(f"{name} {gibi(size)}" for name, size in shown.items())


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Minimum bytes and operations of one call."""

    bytes: int  # weights once, the caches it reads, the recurrent states it writes
    flops: int


def parameters(planned: PlannedPair) -> dict[str, dict[str, int]]:
    """Return the element count of every parameter, by role and by path; no memory is used."""
    leaves = {role: by_path(x, StructuredWeight) for role, x in planned.params.items()}
    return {
        role: {p: math.prod(x.shape) for p, x in found.items()} for role, found in leaves.items()
    }


def weight_bytes(planned: PlannedPair) -> dict[str, dict[str, int]]:
    """Return the bytes of every parameter as the plan stores it, by role and by path."""
    leaves = {role: by_path(x, StructuredWeight) for role, x in planned.params.items()}
    return {role: {p: tree_bytes(x) for p, x in found.items()} for role, found in leaves.items()}


def budget(planned: PlannedPair) -> Budget:
    """Return the memory that a plan needs.

    Temporaries hold one layer's scores, activations and experts, logits, taps, recurrent updates,
    and the caches of a row that is prefilled by itself. Recurrent updates hold convolution inputs,
    keys, corrections and decays until the commit.
    """
    plan, target, state = planned.plan, sizes_of(planned.config), planned.state
    weights = sum(sum(sizes.values()) for sizes in weight_bytes(planned).values())
    item = jnp.dtype(plan.compute_dtype).itemsize
    wide = max(plan.rows * plan.block, plan.fed_rows * max(plan.chunk, planned.wide_prefill))
    # Native kernels keep a thread's scores of a few queries; only the mask is whole.
    scores = wide * plan.slots * (1 if plan.kernels == "native" else 12 * target.num_heads)
    hidden = 8 * item * wide * (target.hidden_size + target.intermediate_size)
    logits = 4 * 4 * plan.rows * plan.block * target.vocab_size
    experts = _experts(target, wide, chosen=plan.kernels == "native")
    taps = wide * target.hidden_size * len(planned.pair.taps)
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    updates = sum(c.inputs.shape[2] * (4 + item) + c.state.shape[1] * 4 for c in recurrent)
    layer = max((tree_bytes(c.state) for c in recurrent), default=0)
    row = tree_bytes(state) // plan.rows if plan.fed_rows < plan.rows else 0
    temporaries = scores + hidden + logits + experts + 2 * taps * item + wide * updates + 4 * layer
    return Budget(weights, tree_bytes(state), temporaries + row, plan.prefix_cache)


# Bytes of a process on a CPU besides its budget: Python, JAX, libraries and what malloc keeps; the
# programs of a layer; an entry of the tokenizer. Fitted to the servers in docs/operating.md.
LIBRARIES, PER_LAYER, PER_TOKEN = 400 * 2**20, 4 * 2**20, 512


def process_rest(planned: PlannedPair) -> int:
    """Return the bytes of a process on a CPU besides the budget of its plan."""
    models = [planned.config, getattr(planned.pair.drafter, "config", None)]
    layers = sum(getattr(config, "num_layers", 0) for config in models)
    return LIBRARIES + PER_LAYER * layers + PER_TOKEN * sizes_of(planned.config).vocab_size


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of a target that estimates use; those that its config lacks are guessed."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int = 1
    num_experts: int = 0
    expert_size: int = 0
    experts_per_token: int = 0


def _experts(c: _Sizes, tokens: int, *, chosen: bool) -> int:
    """Return the bytes of a layer's products by experts: gates and ups of all of them.

    Args:
      chosen: inputs, gates and ups, and outputs of those that tokens chose instead.
    """
    if chosen:
        return 12 * tokens * c.experts_per_token * (c.hidden_size + c.expert_size)
    return 8 * tokens * c.num_experts * c.expert_size


def sizes_of(config: Any) -> _Sizes:
    """Return the sizes of a config of ours, or of another target's."""
    known = {"intermediate_size": 4 * config.hidden_size}
    names = [field.name for field in dataclasses.fields(_Sizes) if hasattr(config, field.name)]
    return _Sizes(**known | {name: getattr(config, name) for name in names})


def work(planned: PlannedPair, step: Step) -> StepWork:
    """Return the minimum work of a prefill, plain or speculative step with full caches."""
    plan, state, target = planned.plan, planned.state, sizes_of(planned.config)
    prefill, drafting = step == Step.PREFILL, step == Step.SPECULATIVE
    usual = plan.chunk if prefill else plan.block
    width = plan.plain_width if step == Step.PLAIN else usual
    rows = plan.fed_rows if prefill else plan.rows
    tokens, head_rows = rows * width, rows * (1 if prefill else width)
    once = dataclasses.replace(plan, weight_layout="row_major")  # a call reads one of two copies
    counts, sizes = parameters(planned), weight_bytes(PlannedPair(planned.pair, once))
    head = target.vocab_size * target.hidden_size
    table = sizes["target"].get("head", head * jnp.dtype(plan.dtype).itemsize)
    body = _multiplied(counts["target"])
    idle, _ = _idle_experts(target, counts["target"], tokens)
    _, asleep = _idle_experts(target, sizes["target"], tokens)
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    moved = _multiplied(sizes["target"]) - asleep + table
    moved += (tree_bytes(state.target) + tree_bytes(recurrent)) * rows // plan.rows
    flops = 2 * ((body - idle) * tokens + head * head_rows)
    flops += _attention_flops(state.target, tokens, target.num_heads)
    states = sum(c.state.size for c in recurrent) * rows // plan.rows
    flops += 7 * width * states  # decay, read, correct, read out
    if planned.pair.drafter is not None:

        def used_of(of: dict[str, int], head: int) -> tuple[int, int]:
            """Return the parameters that the step uses, and those that the context alone uses."""
            context = sum(n for path, n in of.items() if path.endswith(("fc", "kv")))
            return _multiplied(of) + of.get("head", head) if drafting else context, context

        used, context = used_of(counts["drafter"], head)
        moved += used_of(sizes["drafter"], table)[0] + drafting * tree_bytes(state.drafter)
        flops += 2 * tokens * (used + drafting * context)
        heads = getattr(getattr(planned.pair.drafter, "config", None), "num_heads", 1)
        flops += drafting * _attention_flops(state.drafter, tokens, heads)
    return StepWork(moved, flops)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _multiplied(counts: dict[str, int]) -> int:
    """Return the number of weights that every token is multiplied with.

    All matrices except the head and gathered tables.
    """
    tables = ("embed", "head", "layer_embed", "predecessor", "successor", "markov_w1", "d2t")
    return sum(n for path, n in counts.items() if path not in tables)


def _idle_experts(c: _Sizes, counts: dict[str, int], tokens: int) -> tuple[int, int]:
    """Return the expert weights that one token does not use, and those that all tokens do not use.

    The second depends on the routing; it is counted for tokens that share as few experts as
    possible.
    """
    if not c.num_experts:
        return 0, 0
    total = sum(n for path, n in counts.items() if "/experts_" in path)
    each, used = total // c.num_experts, min(c.num_experts, tokens * c.experts_per_token)
    return each * (c.num_experts - c.experts_per_token), each * (c.num_experts - used)


def _attention_flops(caches: Any, tokens: int, num_heads: int) -> int:
    """Count attention scores and weighted sums over every cache."""
    nodes = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, LayerCache))
    sizes = sum(x.slots * x.k.shape[3] for x in nodes if isinstance(x, LayerCache))
    return 4 * tokens * num_heads * sizes


def gibi(n: float) -> str:
    """Return a byte count in binary units, as text."""
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return f"{n / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


# Minimum time of a program: bytes over bandwidth, operations over peak.
#
# The table has sustained rates where they are known, and otherwise those of data sheets.


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of a device."""

    name: str
    platform: str  # JAX's name: "cpu", "gpu" or "tpu"
    bytes_per_s: float  # reads and writes together
    flops_per_s: dict[str, float]  # by dtype
    memory: int  # bytes
    source: str  # of the rates


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
    moving, computing = work.bytes / device.bytes_per_s, work.flops / device.flops_per_s[dtype]
    return Roofline(max(moving, computing), "memory" if moving >= computing else "compute")


def find_device(kind: str) -> Device:
    """Return the table's entry for a JAX device kind or a name, or the CPU entry."""
    names = [name for name, of_jax in TPUS.items() if of_jax == kind]
    names += [name for name in DEVICES if name.lower() in kind.lower()]
    return DEVICES[names[0]] if names else DEVICES["CPU"]
