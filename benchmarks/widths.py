"""Time of a plain step that is one block wide over that of a step of one token, same weights.

    python -m benchmarks.widths MODEL... [--weights int8,float] [--block 8] [--profile] [--json OUT]

A drafted step verifies at the first of these costs, so their ratio bounds what drafting can give.
Both steps are timed in turn, on the cores that the process is given. `--profile` prints what each
kind of operation takes in steps of 1, 8, 16 and 64 tokens instead, under the profiler, which adds
to it.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import interleaved, markdown, ratio, spread

PROMPT, TOKENS = list(range(5, 37)), 48
WIDTHS, MOST = (1, 8, 16, 64), 14  # of a profile; operations that it prints


def measure(model: str, weights: str, block: int, pairs: int) -> dict[str, Any]:
    """Return milliseconds of a step of each width, their paired ratio, and the plan."""
    import dflash_jax as dj
    from benchmarks.modes import generate

    plan = dj.Plan(block=block, max_length=256, weights=weights, exact=False, plain_width=block)
    wide = dj.load(model, None, plan=plan)
    graph = wide.graph.with_plan(plain_width=1)
    narrow = dj.Engine(graph, wide.params, tokenizer=wide.tokenizer)

    def milliseconds(engine: Any) -> float:
        run = generate(engine, PROMPT, max_tokens=TOKENS, ignore_eos=True)
        return 1e3 * run.decode_s / (TOKENS - 1)

    calls = {"one token": lambda: milliseconds(narrow), "block": lambda: milliseconds(wide)}
    samples = interleaved(calls, pairs)
    return {
        "step_ms": {name: spread(numbers).to_json() for name, numbers in samples.items()},
        "block_over_one": ratio(samples, "block", "one token").to_json(),
        "plan": dataclasses.asdict(wide.plan),
        "load": os.getloadavg()[0],
    }


def operations(model: str, weights: str, widths: Sequence[int]) -> dict[str, list[float]]:
    """Return milliseconds of a plain step at some widths, by kind of operation, largest first."""
    import dflash_jax as dj
    from dflash_jax.bench.profile import profile

    found: dict[str, list[float]] = {}
    for at, width in enumerate(widths):
        plan = dj.Plan(block=max(width, 2), max_length=256, weights=weights, exact=False)
        engine = dj.load(model, None, plan=dataclasses.replace(plan, plain_width=width))
        for kernel in profile(engine, PROMPT, speculative=False).kernels:
            name = f"{kernel.part}: {kernel.operation}"
            found.setdefault(name, [0.0] * len(widths))[at] += 1e3 * kernel.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1][-1]))


def main(words: Sequence[str] | None = None) -> int:
    """Measure every model with every kind of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--weights", default="int8,float")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    cases: dict[str, Any] = {}
    for model in options.models:
        for weights in options.weights.split(","):
            if options.profile:
                found = operations(model, weights, WIDTHS)
                total = [sum(times) for times in zip(*found.values(), strict=True)]
                listed = [*list(found.items())[:MOST], ("all", total)]
                rows = [[name, *(f"{ms:.3f}" for ms in times)] for name, times in listed]
                heading = f"{Path(model).stem}, {weights}, ms"
                print("\n".join(markdown(f"{heading} | {' | '.join(map(str, WIDTHS))}", rows)))
                cases[f"{Path(model).stem}, {weights}"] = {"widths": WIDTHS, "ms": found}
                continue
            case = f"{Path(model).stem}, {weights}, {options.block}"
            cases[case] = found = measure(model, weights, options.block, options.pairs)
            one, wide = (found["step_ms"][name]["median"] for name in ("one token", "block"))
            figure = found["block_over_one"]["median"]
            print(f"{case:32} one token {one:7.2f} ms  block {wide:7.2f} ms  {figure:.2f}")
    write_result(options.json, "widths", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
