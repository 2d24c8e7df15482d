"""Training: steps per second and attention memory, split attention against a dense mask.

`python -m benchmarks.train [--json FILE]`

Memory is the temporaries of forward and backward pass of one layer's attention, read from the
compiled program. Steps per second are interleaved measurements, dense and split.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import environment
from benchmarks.paired import interleaved, ratio, spread
from dflash_jax.models import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.train import drafter, optimizer
from dflash_jax.train.attention import HIDDEN, before_anchor, inside_block, split_attention
from dflash_jax.train.recipe import Schedule
from dflash_jax.train.recipes import SMOKE
from dflash_jax.train.target import TrainState

KV, GROUPS, HEAD = 2, 4, 64  # heads of the attention


def dense_attention(
    queries: Any, context: Any, block: Any, anchors: Any, *, causal: bool, window: int | None
) -> Any:
    """Attend with one dense mask [N*T, S + N*T], the baseline."""
    rows, count, width, kv, groups, head = queries.shape
    length, total = context[0].shape[1], count * width
    keys, values = (
        jnp.concatenate([c, b.reshape(rows, total, kv, head)], axis=1)
        for c, b in zip(context, block, strict=True)
    )
    far = before_anchor(anchors, width, length, window).reshape(rows, total, length)
    block_of = jnp.arange(total) // width
    own = jnp.tile(inside_block(width, causal, window), (count, count))
    own &= block_of[:, None] == block_of[None, :]
    near = jnp.broadcast_to(own[None], (rows, total, total))
    seen = jnp.concatenate([far, near], axis=2)[:, None, None]
    q = queries.reshape(rows, total, kv, groups, head)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, keys) * jnp.float32(head**-0.5)
    weights = jax.nn.softmax(jnp.where(seen, scores, HIDDEN), axis=-1)
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights, values)
    return out.reshape(rows, count, width, kv * groups * head)


ATTENTION: dict[str, Callable[..., Any]] = {"dense": dense_attention, "split": split_attention}


def memory(attention: Callable[..., Any], length: int, count: int, width: int) -> int:
    """Return the temporary bytes of one attention's forward and backward pass over one row."""

    def slopes(q: Any, ck: Any, cv: Any, bk: Any, bv: Any, anchors: Any) -> Any:
        def loss(*tensors: Any) -> Any:
            q, ck, cv, bk, bv = tensors
            out = attention(q, (ck, cv), (bk, bv), anchors, causal=False, window=None)
            return (out**2).sum()

        return jax.grad(loss, argnums=range(5))(q, ck, cv, bk, bv)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *sizes), dtype)

    arguments = (
        shape(count, width, KV, GROUPS, HEAD),
        *[shape(length, KV, HEAD)] * 2,
        *[shape(count, width, KV, HEAD)] * 2,
        shape(count, dtype=jnp.int32),
    )
    analysis: Any = jax.jit(slopes).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def stepper(attention: Callable[..., Any], length: int, count: int, width: int) -> Any:
    """Return a function that times one optimizer step of a small drafter."""
    target = tiny_target(num_layers=2, hidden_size=128, head_dim=32, intermediate_size=256)
    config = tiny_drafter(
        target,
        num_layers=2,
        head_dim=32,
        intermediate_size=256,
        block_size=width,
        windows=(None, None),
        causal=(False, False),
        target_layer_ids=(0,),
    )
    pair, params = (
        build_pair(target, config),
        jax.device_put(random_params(build_pair(target, config))),
    )
    recipe = dataclasses.replace(SMOKE, block=width)
    maker = optimizer.build(Schedule(steps=1000, rate=1e-3), decay=0.0, kind="adamw")
    state = TrainState(params=params["drafter"], optimizer=maker.init(params["drafter"]))
    tokens = np.random.default_rng(0).integers(0, 96, (1, length)).astype(np.int32)
    rows = (tokens, np.ones(tokens.shape, bool))
    step = jax.jit(drafter.step(pair, recipe, maker), static_argnums=(5,))
    original = drafter.split_attention
    drafter.split_attention = attention  # replaced while the step is traced below
    try:
        run = step.lower(state, params["target"], rows, None, np.int32(0), count).compile()
    finally:
        drafter.split_attention = original

    def timed() -> float:
        started = time.perf_counter()
        jax.block_until_ready(run(state, params["target"], rows, None, np.int32(0)))
        return time.perf_counter() - started

    return timed


def main() -> None:
    """Print a summary and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048, help="S, tokens of a row")
    parser.add_argument("--anchors", type=int, default=64, help="N, blocks of a row")
    parser.add_argument("--block", type=int, default=16, help="b, places of a block")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/train.json"))
    options = parser.parse_args()
    sizes = (options.length, options.anchors, options.block)
    read = {name: memory(attention, *sizes) for name, attention in ATTENTION.items()}
    steppers = {name: stepper(attention, *sizes) for name, attention in ATTENTION.items()}
    seconds = interleaved(steppers, options.pairs)
    steps = {name: spread([1 / s for s in taken]) for name, taken in seconds.items()}
    faster = ratio(seconds, "dense", "split")
    found = {
        "sizes": dict(zip(("length", "anchors", "block"), sizes, strict=True)),
        "heads": {"kv": KV, "groups": GROUPS, "head_dim": HEAD},
        "attention_temporary_bytes": read,
        "attention_memory_ratio": read["dense"] / read["split"],
        "steps_per_s": {name: s.to_json() for name, s in steps.items()},
        "dense_over_split_seconds": faster.to_json(),
        "environment": environment(),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, size in read.items():
        print(f"{name:6} {size / 2**20:8.1f} MiB of temporaries, {steps[name]} steps/s")
    print(f"split needs {found['attention_memory_ratio']:.1f}x less memory; {faster}x the speed")


if __name__ == "__main__":
    main()
