"""The full-count lossless check on the shipped pair: speculative == plain, token for token.

    python -m benchmarks.soak [--out benchmarks/results/soak_lossless.json]

Float32 and bfloat16, several block sizes, prompts of 1 token and around chunk boundaries, and
held-out conversations; with the shipped drafter, a random one, an oracle that is always right
and an adversary that is always wrong. Exits with 1 if a single token differs.
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

import jax
import numpy as np

import dflash_jax as dj
from benchmarks.environment import environment
from dflash_jax.bench.compare import LosslessCheck
from dflash_jax.engine.engine import Engine
from dflash_jax.models import build_pair
from dflash_jax.testing import random_params, scripted_engine, set_script

DTYPES, BLOCKS, CHUNK = ("float32", "bfloat16"), (2, 5, 8, 12), 64
BOUNDARIES = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)


@dataclasses.dataclass
class Tally:
    """Counts of compared prompts and tokens under one heading."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    different: int = 0

    def add(self, check: LosslessCheck) -> None:
        self.prompts += 1
        self.tokens += len(check.speculative.token_ids)
        self.rounds += check.speculative.stats.rounds
        self.different += not check.equal


def heldout_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return held-out conversations of the shipped pair as token ids."""
    path = Path(dj.__file__).parent / "data" / "tiny" / "heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chats = [row for row in rows if "messages" in row][:count]
    return [
        engine.chat_ids(row["messages"], **({"tools": row["tools"]} if row.get("tools") else {}))
        for row in chats
    ]


def prompts(engine: Engine, chats: int) -> list[list[int]]:
    """Return prompts around every chunk boundary, and whole conversations."""
    found = heldout_prompts(engine, 40)
    text = list(itertools.chain.from_iterable(found))
    starts = np.random.default_rng(0).integers(0, len(text) - 2 * CHUNK - 2, len(BOUNDARIES))
    cut = [text[s : s + n] for s, n in zip(starts.tolist(), BOUNDARIES, strict=True)]
    return cut + found[:chats]


def checks(real: Engine, max_tokens: int, chats: int) -> Iterator[tuple[str, LosslessCheck]]:
    """Decode every prompt with every drafter of one plan."""
    params = random_params(build_pair(real.target, real.drafter), dtype=real.plan.dtype, seed=1)
    drafter = jax.device_put(params["drafter"])
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    scripted = scripted_engine(real)
    trained = real.params
    for prompt in prompts(real, chats):
        real.params = trained
        plain = real.generate(prompt, speculative=False, **options)
        yield "shipped", LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        real.params = trained | {"drafter": drafter}
        yield "random", LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        truth = [*prompt, *plain.token_ids]
        wrong = [(t + 1) % real.target.vocab_size for t in truth]
        for name, script in (("oracle", truth), ("adversarial", wrong)):
            set_script(scripted, script)
            yield name, LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)
    real.params = trained


def main() -> int:
    """Run the whole grid and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_lossless.json"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chats", type=int, default=4, help="held-out conversations per plan")
    options = parser.parse_args()
    started, tallies = time.perf_counter(), {}
    for dtype, block in itertools.product(DTYPES, BLOCKS):
        engine = dj.load(plan=dj.Plan(dtype=dtype, block=block, chunk=CHUNK, max_length=1024))
        engine.measures_drafting = False
        for name, check in checks(engine, options.max_tokens, options.chats):
            key = f"{dtype} block {block} {name}"
            tallies.setdefault(key, Tally()).add(check)
            if not check.equal:
                print(f"DIFFERS: {key}, token {check.first_difference}, {check.prompt}")
        done = sum(t.tokens for t in tallies.values())
        print(f"{dtype:9} block {block:2}: {done:6} tokens so far", flush=True)
    total = sum(t.tokens for t in tallies.values())
    different = sum(t.different for t in tallies.values())
    report = {
        "suite": "soak_lossless",
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
