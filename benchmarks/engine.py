"""Throughput of the engine over many rows, with and without cached prefixes.

    python -m benchmarks.engine [--rows 1,4,16,32] [--json OUT]

Every sample serves the same requests: users of one system prompt, four per row. `cold` clears the
prefix cache before each sample, `warm` keeps it, `plain` clears it and does not draft; samples are
interleaved.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.paired import interleaved, ratio, spreads

HEADINGS = ("rows", "cold tok/s", "warm tok/s", "plain tok/s", "drafted/plain", "cold prefill s",
            "warm prefill s")  # fmt: skip
WIDTH = 200  # of the table, so that it stays one


def measure(rows: int, pairs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return output tokens per second of one plan, and seconds to the first token."""
    import dflash_jax as dj
    from benchmarks.cases import heldout_chats

    shape = {"rows": rows, "max_length": 512, "chunk": options.chunk, "prefix_cache": 1 << 27}
    plan = dj.Plan(**shape, weights=options.weights)
    engine = dj.load(plan=plan)
    engine.measures_drafting = False
    cache = engine.core.prefix_cache
    assert cache is not None
    texts = heldout_chats(engine.chat_ids, 40)
    system = [token for text in texts for token in text][: options.shared]
    prompts = [[*system, *texts[i % len(texts)][-40:]] for i in range(4 * rows)]
    limits: Any = {"max_tokens": options.max_tokens, "ignore_eos": True}
    kinds = ("cold", "warm", "plain")
    seen: dict[str, Any] = {"first": {name: [] for name in kinds}, "cached": {}, "tokens": {}}

    def serve(name: str) -> float:
        if name != "warm":
            cache.clear()
        drafting = name != "plain"
        started = time.perf_counter()
        results = engine.generate_many(prompts, speculative=drafting, **limits)
        seconds = time.perf_counter() - started
        firsts = sorted(result.stats.prefill_s for result in results)
        seen["first"][name].append(firsts[len(firsts) // 2])
        seen["cached"][name] = sum(result.stats.cached_tokens for result in results)
        seen["tokens"][name] = [result.token_ids for result in results]
        return sum(len(result.token_ids) for result in results) / seconds

    samples = interleaved({name: lambda name=name: serve(name) for name in kinds}, pairs)
    if not seen["tokens"]["cold"] == seen["tokens"]["warm"] == seen["tokens"]["plain"]:
        raise SystemExit(f"{rows} rows: kept prefixes or drafts changed the output")
    return {
        "rows": rows,
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "cached_tokens": seen["cached"],
        "tokens_per_s": spreads(samples),
        "prefill_s": spreads({name: x[1:] for name, x in seen["first"].items()}),
        "warm_over_cold": ratio(samples, "warm", "cold").to_json(),
        "drafted_over_plain": ratio(samples, "cold", "plain").to_json(),
    }


def main() -> int:
    """Measure every number of rows and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,16,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--shared", type=int, default=256, help="tokens of the system prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--weights", default="float")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    import os

    from benchmarks.environment import write_result
    from dflash_jax.cli.terminal import table
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    reports = []
    for rows in map(int, options.rows.split(",")):
        report = measure(rows, options.pairs, options)
        reports.append(report | {"load": os.getloadavg()[0]})
        speeds = [f"{found['median']:.1f}" for found in report["tokens_per_s"].values()]
        ratio = f"{report['drafted_over_plain']['median']:.2f}"
        first = [f"{report['prefill_s'][name]['median']:.3f}" for name in ("cold", "warm")]
        print(table(HEADINGS, [[str(rows), *speeds, ratio, *first]], WIDTH), flush=True)
    write_result(options.json, "engine", {"weights": options.weights, "cases": reports})
    return 0


if __name__ == "__main__":
    sys.exit(main())
