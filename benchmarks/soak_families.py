"""The full-count lossless check of every family: speculative == plain, token for token.

    python -m benchmarks.soak_families [--out benchmarks/results/soak_families.json]

Small random models with every feature of their family; prompts of one token and of many windows,
prefilled in chunks of 1, 7, 64 and 512 tokens; blocks of four widths; at least 5,000 tokens for
each family and dtype under random acceptance patterns. Exits with 1 if a single token differs.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment
from benchmarks.soak import Tally
from dflash_jax import Plan
from dflash_jax.bench.compare import LosslessCheck
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

DTYPES = ("float32", "bfloat16")
BLOCKS = {1: 5, 7: 8, 64: 16, 512: 2}  # chunk -> block
OWN_DRAFTS = 7  # chunk size that also runs with the drafter's own drafts
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 16,
    "shared_expert_size": 20,
}
DENSE: dict[str, Any] = {"num_experts": 0, "per_layer_size": 0, "shared_layers": 0}
FAMILIES: dict[str, TargetConfig] = {
    "llama": tiny_target(model_type="llama"),
    "qwen3, two windows": tiny_target(windows=(10, None, 24)),
    "qwen3_moe": tiny_moe(),
    "qwen3_5": tiny_hybrid(),
    "qwen3_5_moe": tiny_hybrid(**EXPERTS),
    "gemma4": tiny_gemma(**DENSE),
    "gemma4, experts, shared keys, per-layer inputs": tiny_gemma(),
    "gpt_oss": tiny_gpt_oss(),
}
WALKERS: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dspark": {"markov_head": "gated", "draft_vocab_size": 60, "own_head": True},
}


def pairs() -> Iterator[tuple[str, TargetConfig, DrafterConfig]]:
    """Return every family with a v1 drafter, and every other drafter with a Qwen3."""
    for name, target in FAMILIES.items():
        yield name, target, tiny_drafter(target)
    for kind, own in WALKERS.items():
        target = tiny_target()
        yield f"{kind} drafter", target, tiny_drafter(target, kind, **own)


def checks(
    target: TargetConfig, drafter: DrafterConfig, plan: Plan, tokens: int, seed: int
) -> Iterator[LosslessCheck]:
    """Decode `tokens` tokens with one plan, under random acceptance patterns."""
    rng, vocab = np.random.default_rng(seed), target.vocab_size
    real = random_engine(target, drafter, plan, seed=seed)
    scripted = scripted_engine(real)
    for length in (1, 130, 530):
        prompt = rng.integers(0, vocab, length).tolist()
        options: dict[str, Any] = {"max_tokens": tokens // 3, "ignore_eos": True}
        plain = scripted.generate(prompt, speculative=False, **options)
        pattern = rng.integers(0, plan.block, tokens).tolist()
        truth = [*prompt, *plain.token_ids]
        set_script(scripted, force_acceptance(truth, length, pattern, vocab))
        yield LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)
        if length == 130 and plan.chunk == OWN_DRAFTS:
            yield LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)


def main() -> int:
    """Run the whole grid and write the result."""
    known = [name for name, *_ in pairs()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_families.json"))
    parser.add_argument("--tokens", type=int, default=1260, help="for each family, dtype and chunk")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="FAMILY")
    options = parser.parse_args()
    started, tallies = time.perf_counter(), {}
    wanted = [pair for pair in pairs() if pair[0] in options.only]
    for (name, target, drafter), dtype in itertools.product(wanted, options.dtypes):
        tally = tallies.setdefault(f"{name}, {dtype}", Tally())
        for chunk, block in BLOCKS.items():
            plan = Plan(max_length=544 + options.tokens // 3, chunk=chunk, block=block, dtype=dtype)
            for check in checks(target, drafter, plan, options.tokens, chunk):
                tally.add(check)
                if not check.equal:
                    where = f"{name}, {dtype}, chunk {chunk}, block {block}"
                    print(f"DIFFERS: {where}, token {check.first_difference}")
        print(f"{name}, {dtype}: {tally.tokens} tokens", flush=True)
    total = sum(t.tokens for t in tallies.values())
    different = sum(t.different for t in tallies.values())
    report = {
        "suite": "soak_families",
        "tokens": total,
        "different_prompts": different,
        "seconds": round(time.perf_counter() - started, 1),
        "environment": environment(),
        "cases": {key: dataclasses.asdict(t) for key, t in tallies.items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{total} tokens compared, {different} prompts differ; written to {options.out}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
