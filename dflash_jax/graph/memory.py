"""Bytes that a plan needs, from abstract shapes; nothing is allocated."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.kernels.caches import RecurrentCache
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


def parameters(planned: PlannedPair) -> dict[str, dict[str, int]]:
    """Return the element count of every parameter, by role and by path; no memory is used."""
    leaves = {role: by_path(x, StructuredWeight) for role, x in planned.params.items()}
    return {
        role: {p: math.prod(x.shape) for p, x in of_role.items()}
        for role, of_role in leaves.items()
    }


def weight_bytes(planned: PlannedPair) -> dict[str, dict[str, int]]:
    """Return the bytes of every parameter as the plan stores it, by role and by path."""
    leaves = {role: by_path(x, StructuredWeight) for role, x in planned.params.items()}
    return {
        role: {p: tree_bytes(x) for p, x in of_role.items()} for role, of_role in leaves.items()
    }


def budget(planned: PlannedPair) -> Budget:
    """Return the memory that a plan needs.

    Temporaries hold one layer's scores, activations and experts, logits, taps, recurrent updates,
    and the caches of a row that is prefilled by itself. Recurrent updates hold convolution inputs,
    keys, corrections and decays until the commit.
    """
    plan = planned.plan
    target = sizes_of(planned.config)
    state = planned.state
    weights = sum(sum(sizes.values()) for sizes in weight_bytes(planned).values())
    item = jnp.dtype(plan.compute_dtype).itemsize
    wide = max(plan.rows * plan.block, plan.prefill_rows * max(plan.chunk, planned.wide_prefill))
    # Native kernels keep a thread's scores of a few queries; only the mask is whole.
    scores = wide * plan.slots * (1 if plan.kernels == "native" else 12 * target.num_heads)
    hidden = 8 * item * wide * (target.hidden_size + target.intermediate_size)
    logits = 4 * 4 * plan.rows * plan.block * target.vocab_size
    experts = _experts(target, wide, chosen=plan.kernels == "native")
    taps = wide * target.hidden_size * len(planned.pair.taps)
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    updates = sum(c.inputs.shape[2] * (4 + item) + c.state.shape[1] * 4 for c in recurrent)
    layer = max((tree_bytes(c.state) for c in recurrent), default=0)
    row = tree_bytes(state) // plan.rows if plan.prefill_rows < plan.rows else 0
    temporaries = scores + hidden + logits + experts + 2 * taps * item + wide * updates + 4 * layer
    return Budget(weights, tree_bytes(state), temporaries + row, plan.prefix_cache)


# Bytes of a process on a CPU besides its budget: Python, JAX, libraries and what malloc keeps; the
# programs of a layer; an entry of the tokenizer. Fitted to the servers in docs/operating.md.
LIBRARIES = 400 * 2**20
PER_LAYER = 4 * 2**20
PER_TOKEN = 512


def process_rest(planned: PlannedPair) -> int:
    """Return the bytes of a process on a CPU besides the budget of its plan."""
    models = [planned.config, getattr(planned.pair.drafter, "config", None)]
    layers = sum(getattr(config, "num_layers", 0) for config in models)
    return LIBRARIES + PER_LAYER * layers + PER_TOKEN * sizes_of(planned.config).vocab_size


@dataclasses.dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target that estimates use; those that its config lacks are guessed."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_experts: int
    expert_size: int
    experts_per_token: int


def _experts(c: TargetSizes, tokens: int, *, chosen: bool) -> int:
    """Return the bytes of a layer's products by experts: gates and ups of all of them.

    Args:
      chosen: inputs, gates and ups, and outputs of those that tokens chose instead.
    """
    if chosen:
        return 12 * tokens * c.experts_per_token * (c.hidden_size + c.expert_size)
    return 8 * tokens * c.num_experts * c.expert_size


def sizes_of(config: Any) -> TargetSizes:
    """Return the sizes of a config of ours, or of another target's."""
    return TargetSizes(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 4 * config.hidden_size),
        num_heads=getattr(config, "num_heads", 1),
        num_experts=getattr(config, "num_experts", 0),
        expert_size=getattr(config, "expert_size", 0),
        experts_per_token=getattr(config, "experts_per_token", 0),
    )


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gibi(n: float) -> str:
    """Return a byte count in binary units, as text."""
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return f"{n / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
