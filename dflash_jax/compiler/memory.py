"""Byte and operation counts of a plan, from abstract shapes: nothing is allocated to know them."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import abstract_params, empty_state
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.quant.layouts import StructuredWeight
from dflash_jax.state import LayerCache, RecurrentCache


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes on the device."""

    weights: int
    caches: int
    temporaries: int  # an upper estimate for the widest program
    prefixes: int = 0  # kept prefixes of prompts, at most

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.temporaries + self.prefixes

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"total": self.total}
        if not self.prefixes:
            del parts["prefixes"]
        return ", ".join(f"{name} {gibi(size)}" for name, size in parts.items())


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must at least move and multiply."""

    bytes: int  # weights once, the caches it reads, the recurrent states it writes
    flops: int


@functools.lru_cache(maxsize=64)
def parameters(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, dict[str, int]]:
    """Element counts of every parameter, by role and by path; no memory is used."""
    plan = Plan(max_length=2, block=2, chunk=1, dtype="float32")
    tree = abstract_params(plan, target, drafter)
    return {
        role: {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree[role])
        }
        for role in tree
    }


def weight_bytes(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, dict[str, int]]:
    """Bytes of every parameter as the plan keeps it, by role and by path."""
    tree = abstract_params(plan, target, drafter)
    return {
        role: {
            jax.tree_util.keystr(path, simple=True, separator="/"): tree_bytes(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                tree[role], is_leaf=lambda x: isinstance(x, StructuredWeight)
            )
        }
        for role in tree
    }


def target_weights(c: TargetConfig) -> int:
    """Parameters of a target."""
    return sum(parameters(c, None)["target"].values())


def drafter_weights(target: TargetConfig, c: DrafterConfig) -> int:
    """Parameters of a drafter (published totals: Qwen3-8B-b16 has 1,048,626,432)."""
    return sum(parameters(target, c)["drafter"].values())


def budget(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> Budget:
    """What a resolved plan needs for these models."""
    weights = sum(sum(sizes.values()) for sizes in weight_bytes(plan, target, drafter).values())
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    temporaries = _temporary_bytes(plan, target, drafter)
    return Budget(weights, tree_bytes(state), temporaries, plan.prefix_cache)


def work(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None, program: str) -> Work:
    """Least bytes and operations of a program of `declare`, caches counted at full capacity."""
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    name = program.removesuffix("_sampled")
    width = {"prefill": plan.chunk, "plain1": 1}.get(name, plan.block)
    rows = plan.fed_rows if name == "prefill" else plan.rows
    tokens, head_rows = rows * width, rows * (1 if name == "prefill" else width)
    once = dataclasses.replace(plan, weight_layout="row_major")  # a call reads one of two copies
    counts, sizes = parameters(target, drafter), weight_bytes(once, target, drafter)
    head, table = target.vocab_size * target.hidden_size, sizes["target"]["head"]
    body = _multiplied(counts["target"])
    idle, _ = _idle_experts(target, counts["target"], tokens)
    _, asleep = _idle_experts(target, sizes["target"], tokens)
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    moved = _multiplied(sizes["target"]) - asleep + table
    moved += (tree_bytes(state.target) + tree_bytes(recurrent)) * rows // plan.rows
    flops = 2 * ((body - idle) * tokens + head * head_rows)
    flops += _attention_flops(state.target, tokens, target)
    states = sum(c.state.size for c in recurrent) * rows // plan.rows
    flops += 7 * width * states  # decay, read, correct, read out
    if drafter is not None:
        drafting = name == "speculative"

        def used_of(of: dict[str, int], head: int) -> tuple[int, int]:
            """What the program uses of the drafter, and what the context alone does."""
            context = sum(n for path, n in of.items() if path.endswith(("fc", "kv")))
            return _multiplied(of) + of.get("head", head) if drafting else context, context

        used, context = used_of(counts["drafter"], head)
        moved += used_of(sizes["drafter"], table)[0] + drafting * tree_bytes(state.draft)
        flops += 2 * tokens * (used + drafting * context)
        flops += drafting * _attention_flops(state.draft, tokens, drafter)
    return Work(moved, flops)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _item(plan: Plan) -> int:
    return jnp.dtype(plan.dtype).itemsize


def _multiplied(counts: dict[str, int]) -> int:
    """Weights every token is multiplied with: all matrices but the head and gathered tables."""
    tables = ("embed", "head", "layer_embed", "predecessor", "successor", "markov_w1", "d2t")
    return sum(n for path, n in counts.items() if path not in tables)


def _idle_experts(c: TargetConfig, counts: dict[str, int], tokens: int) -> tuple[int, int]:
    """Weights of experts that one token does not use, and that at least `tokens` together don't.

    The least bytes are not known before the routing is; counted is the routing in which no two
    tokens share an expert while there are others left.
    """
    if not c.num_experts:
        return 0, 0
    total = sum(n for path, n in counts.items() if "/experts_" in path)
    each, used = total // c.num_experts, min(c.num_experts, tokens * c.experts_per_token)
    return each * (c.num_experts - c.experts_per_token), each * (c.num_experts - used)


def _attention_flops(caches: Any, tokens: int, c: TargetConfig | DrafterConfig) -> int:
    """Scores and sums of every cache once; its width is its layer's own."""
    sizes = sum(x.slots * x.k.shape[3] for x in caches if isinstance(x, LayerCache))
    return 4 * tokens * c.num_heads * sizes


def _temporary_bytes(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> int:
    """Upper estimate: a layer's scores, activations, experts; logits, taps, what commits need;
    the caches of a row that is fed apart from the others.
    """
    wide = max(plan.rows * plan.block, plan.fed_rows * plan.chunk)
    scores = 3 * 4 * wide * target.num_heads * plan.slots
    hidden = 8 * _item(plan) * wide * (target.hidden_size + target.intermediate_size)
    logits = 4 * 4 * plan.rows * plan.block * target.vocab_size
    experts = 8 * wide * target.num_experts * target.expert_size  # all of them, gate and up
    taps = wide * target.hidden_size * (len(drafter.target_layer_ids) if drafter else 0)
    recurrent = _recurrent_bytes(plan, target)
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    row = tree_bytes(state) // plan.rows if plan.fed_rows < plan.rows else 0
    return scores + hidden + logits + experts + 2 * taps * _item(plan) + recurrent + row


def _recurrent_bytes(plan: Plan, target: TargetConfig) -> int:
    """What all recurrent layers keep of a call, and what one of them needs while it runs.

    Kept until the commit: convolution inputs, keys, corrections, decays.
    """
    state = jax.eval_shape(lambda: empty_state(plan, target, None))
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    wide = sum(c.inputs.shape[2] * (4 + _item(plan)) + c.state.shape[1] * 4 for c in recurrent)
    one = max((tree_bytes(c.state) for c in recurrent), default=0)
    tokens = max(plan.rows * plan.block, plan.fed_rows * plan.chunk)
    return tokens * wide + 4 * one


def gibi(n: float) -> str:
    """A byte count for people."""
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return f"{n / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
