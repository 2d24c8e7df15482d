"""Time of a step whose rows sample over that of a greedy one, by vocabulary, rows and step.

    python -m benchmarks.sampled [--pairs 9] [--json OUT]

The vocabularies are those of the shipped pair, of SmolLM2 (packed, if it is installed) and of Qwen3
(the shape of Qwen3-0.6B with random int8 weights, drafted from the text). Temperature is 0.8,
without filters and with what chat clients send: top-p 0.9 and top-k 40. Kinds of steps are timed in
turn, over all rows of one engine.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import interleaved, ratio, spread

PROMPT = list(range(5, 37))
TOKENS = 64
MOST = 256
SAMPLED = {"temperature": 0.8, "seed": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_p": 0.9, "top_k": 40},
}


def engines(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield names and engines, one for each vocabulary."""
    import dflash_jax as dj
    from benchmarks.cases import Shape
    from dflash_jax.errors import DFlashError
    from dflash_jax.graph.ngram import NGram
    from dflash_jax.networks import build_pair
    from dflash_jax.random_weights import engine

    plan = dj.Plan(rows=rows, max_length=MOST)
    for name in ("tiny", "smollm2"):
        try:
            yield name, dj.load(name, plan=plan)
        except DFlashError as error:
            print(f"{name} is skipped: {error}", file=sys.stderr)
    target = Shape(1024, 28, 16, 3072, 151936).target()
    pair = dataclasses.replace(build_pair(target), drafter=NGram(block=4, least=1))
    yield "qwen3-0.6b", engine(dj.Graph(pair, dataclasses.replace(plan, weights="int8")))


def measure(engine: Any, pairs: int) -> dict[str, Any]:
    """Return milliseconds of plain and drafted steps, and the paired ratios over greedy ones."""
    engine.measures_drafting = False
    prompts = [PROMPT] * engine.plan.rows
    figures: dict[str, Any] = {}

    def milliseconds(kind: str, speculative: bool) -> float:
        results = engine.generate_many(
            prompts,
            speculative=speculative,
            max_tokens=TOKENS,
            ignore_eos=True,
            **OPTIONS[kind],
        )
        stats = max((r.stats for r in results), key=lambda s: s.rounds + s.plain_steps)
        return 1e3 * stats.decode_s / (stats.rounds + stats.plain_steps)

    for step, drafts in (("plain", False), ("speculative", True)):
        calls = {kind: lambda kind=kind, d=drafts: milliseconds(kind, d) for kind in OPTIONS}
        samples = interleaved(calls, pairs)
        figures[step] = {
            "step_ms": {kind: spread(numbers).to_json() for kind, numbers in samples.items()},
            "sampled_over_greedy": ratio(samples, "sampled", "greedy").to_json(),
            "filtered_over_greedy": ratio(samples, "filtered", "greedy").to_json(),
        }
    return figures | {"plan": dataclasses.asdict(engine.plan), "load": os.getloadavg()[0]}


def main(words: Sequence[str] | None = None) -> int:
    """Measure every vocabulary with one row and with four."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    cases: dict[str, Any] = {}
    for rows in (1, 4):
        for name, engine in engines(rows):
            case = f"{name}, V {engine.graph.config.vocab_size}, rows {rows}"
            cases[case] = figures = measure(engine, options.pairs)
            for step in ("plain", "speculative"):
                greedy = figures[step]["step_ms"]["greedy"]["median"]
                over = [
                    figures[step][f"{kind}_over_greedy"]["median"]
                    for kind in ("sampled", "filtered")
                ]
                shown = f"sampled {over[0]:.3f}  filtered {over[1]:.3f}"
                print(f"{case:32} {step:12} greedy {greedy:7.2f} ms  {shown}", flush=True)
    write_result(options.json, "sampled", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
