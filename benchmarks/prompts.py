"""Time to the first token by the length of a prompt: calls of several widths over one width.

    python -m benchmarks.prompts [--target smollm2] [--weights packed,int8] [--pairs 9] [--json OUT]

Two engines answer the same random prompts with one token, in turn: one has the programs of the
variant "chunks", the other feeds every prompt in chunks of the plan.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import interleaved, ratio, spread

LENGTHS = (10, 30, 100, 300, 512, 900)
ONE, SEVERAL = "one width", "several widths"


def measure(target: str, weights: str, pairs: int) -> dict[str, Any]:
    """Return milliseconds to the first token and their paired ratios, by length."""
    import dflash_jax as dj

    plan, found = dj.Plan(weights=weights, prefix_cache=0), {}
    engines = {name: dj.load(target, None, plan=plan) for name in (ONE, SEVERAL)}
    engines[ONE].warm_up()
    engines[ONE].core.runner.chunks = ()
    engines[SEVERAL].warm_up("greedy", "chunks")
    rng = np.random.default_rng(0)
    for length in LENGTHS:

        def milliseconds(name: str, length: int = length) -> float:
            ids = rng.integers(5, 1000, length).tolist()
            return 1e3 * engines[name].generate(ids, max_tokens=1).stats.prefill_s

        calls = {name: lambda name=name, f=milliseconds: f(name) for name in engines}
        samples = interleaved(calls, pairs)
        found[str(length)] = {
            "first_token_ms": {name: spread(x).to_json() for name, x in samples.items()},
            "speed": ratio(samples, ONE, SEVERAL).to_json(),
        }
    chosen = engines[SEVERAL]
    shown = {"plan": dataclasses.asdict(chosen.plan), "chunks": list(chosen.graph.chunks)}
    return {"lengths": found, "load": os.getloadavg()[0], **shown}


def main(words: Sequence[str] | None = None) -> int:
    """Measure every kind of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--weights", default="packed,int8")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    cases: dict[str, Any] = {}
    for weights in options.weights.split(","):
        cases[weights] = found = measure(options.target, weights, options.pairs)
        for length, figures in found["lengths"].items():
            times = figures["first_token_ms"]
            one, several = (f"{times[name]['median']:7.1f} ms" for name in (ONE, SEVERAL))
            speed = figures["speed"]["median"]
            print(f"{weights:8} {length:>5} tokens {one} {several}  {speed:.2f}", flush=True)
    write_result(options.json, "prompts", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
