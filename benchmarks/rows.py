"""What rows that wait cost: requests on engines of several rows over as many rows as they need.

    python -m benchmarks.rows [--target smollm2] [--weights packed,int8] [--rows 1,4,8,16]
        [--live 1,4] [--pairs 9] [--json OUT]

Engines of every number of rows share one copy of the weights and answer the same prompts in turn,
with and without drafts, all drafts of the plan's block. All answers of a prompt are equal.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result
from benchmarks.paired import interleaved, markdown, ratio, spread

PROMPTS = (
    "Give me three tips for learning a language.",
    "How do plants grow, and what do they need for it?",
    "Write a short story about a lighthouse and a fox.",
    "What is the difference between a virus and a bacterium?",
)
TOKENS = 64


def measure(target: str, weights: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a token of all requests, and their paired ratios."""
    import dflash_jax as dj

    first = dj.load(target, plan=dj.Plan(weights=weights, rows=min(options.rows), prefix_cache=0))
    engines = {first.plan.rows: first}
    for rows in options.rows:
        if rows not in engines:
            plan = dataclasses.replace(first.plan, rows=rows)
            graph = dj.graph.Graph(first.graph.pair, plan)
            engines[rows] = type(first)(graph, first.params, tokenizer=first.tokenizer)
    for engine in engines.values():
        engine.measures_drafting = False
        engine.warm_up()
    tokenizer = first.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in PROMPTS[: max(options.live)]]
    answers: dict[int, Any] = {}
    token_ms_of: dict[str, Any] = {}
    for live in options.live:
        for mode, speculative in (("plain", False), ("drafted", True)):

            def token_ms(rows: int, live: int = live, drafts: bool = speculative) -> float:
                started = time.perf_counter()
                results = engines[rows].generate_many(
                    prompts[:live], max_tokens=TOKENS, ignore_eos=True, speculative=drafts
                )
                seconds = time.perf_counter() - started
                for i, result in enumerate(results):
                    if answers.setdefault(i, result.token_ids) != result.token_ids:
                        raise SystemExit(f"prompt {i} has another answer in {rows} rows")
                return 1e3 * seconds / TOKENS

            wide = [rows for rows in options.rows if rows >= live]
            calls = {str(rows): lambda rows=rows, f=token_ms: f(rows) for rows in wide}
            samples = interleaved(calls, options.pairs)
            token_ms_of[f"{live} live, {mode}"] = {
                rows: spread(x).to_json() | {"over": ratio(samples, rows, str(wide[0])).to_json()}
                for rows, x in samples.items()
            }
    return {"plan": dataclasses.asdict(first.plan), "token_ms": token_ms_of}


def table(figures: dict[str, Any]) -> list[str]:
    """Return the times of all weights in Markdown, by the number of rows."""
    lines = []
    numbers: dict[str, None] = {}
    for weights, of_weights in figures.items():
        for requests, by_rows in of_weights["token_ms"].items():
            numbers |= dict.fromkeys(by_rows)
            fewest = next(iter(by_rows.values()))["median"]
            ratios = {rows: f"{times['over']['median']:.2f}" for rows, times in by_rows.items()}
            lines.append((weights, requests, f"{fewest:.1f}", ratios))
    cells = [[*names, *(ratios.get(rows, "") for rows in numbers)] for *names, ratios in lines]
    columns = " | ".join(f"{rows} rows" for rows in numbers)
    return markdown(f"weights | requests | ms a token, fewest rows | {columns}", cells)


def main(words: Sequence[str] | None = None) -> int:
    """Measure every kind of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--weights", default="packed,int8")
    for name, numbers in (("--rows", "1,4,8,16"), ("--live", "1,4")):
        parser.add_argument(name, default=numbers)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    for name in ("rows", "live"):
        setattr(options, name, sorted(map(int, getattr(options, name).split(","))))
    figures = {
        weights: measure(options.target, weights, options) for weights in options.weights.split(",")
    }
    print(*table(figures), sep="\n")
    shown = {"target": options.target, "tokens": TOKENS, "load_average": os.getloadavg()[0]}
    write_result(options.json, "rows", shown | {"figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
