"""Drafts copied from the text, beside a trained drafter and none, by kind of prompt.

    python -m benchmarks.copies [--target smollm2] [--weights packed] [--blocks 2,3,4,8]
        [--rows 8] [--json OUT]

Copy-heavy prompts ask for text that the prompt has: an edit of code, a quotation, a tool's result.
All ways decode every prompt in turn, greedily, and their outputs are compared. `adaptive` ways
have the widest block and verify as many drafts as pay off; all others draft whole blocks always.
With several rows, easy and hard prompts of all kinds are decoded at once.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import interleaved, markdown, ratio

CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
REPORT = (
    "The bridge across the northern river was closed on Monday because two of its cables had"
    " rusted. Engineers said that the repair would take eleven weeks and cost four million"
    " crowns. Until then, buses to the harbour take the road along the old railway line, and the"
    " ferry runs every twenty minutes between six in the morning and midnight."
)
RESULT = """src/main.py:14: unused name `total`
src/main.py:31: line too long
src/io.py:7: no newline"""
PROMPTS: dict[str, tuple[str, ...]] = {
    "copy": (
        f"Write this code again with `values` renamed to `numbers`:\n\n{CODE}",
        f"Add a docstring to each function and print the whole file:\n\n{CODE}",
        f"Repeat this report word for word:\n\n{REPORT}",
        f"A tool printed these lines. Print them again, then say what to do:\n\n{RESULT}",
    ),
    "code": (
        "Write a Python function that returns the prime numbers below n.",
        "Write a JavaScript class for a queue with push, pop and size.",
    ),
    "chat": (
        "Why is the sky blue? Explain it to a child.",
        "Give me three tips for learning a language.",
    ),
}


ADAPTIVE = "adaptive"


def batches(rows: int) -> dict[str, list[list[str]]]:
    """Return the prompts of each kind that are decoded at once; "mixed" for several rows."""
    if rows == 1:
        return {kind: [[prompt] for prompt in prompts] for kind, prompts in PROMPTS.items()}
    longest = max(map(len, PROMPTS.values()))
    turns = [kind[i % len(kind)] for i in range(longest) for kind in PROMPTS.values()]
    return {"mixed": [[turns[i % len(turns)] for i in range(rows)]]}


def engines(target: str, weights: str, blocks: Sequence[int], rows: int) -> dict[str, Any]:
    """Return engines of one target by name: without a drafter, with its own, and with copies."""
    import dflash_jax as dj

    plan = dj.Plan(max_length=768, weights=weights, rows=rows)
    ways = {"plain": dj.load(target, None, plan=plan), "drafter": dj.load(target, plan=plan)}
    ways[f"drafter, {ADAPTIVE}"] = dj.load(target, plan=plan)
    for block in blocks:
        names = [f"block {block}"]
        if block == max(blocks):
            names.append(ADAPTIVE)
        wide = dataclasses.replace(plan, block=block)
        both = dataclasses.replace(wide, ngram=4)
        for name in names:
            ways[f"ngram, {name}"] = dj.load(target, "ngram", plan=wide)
            ways[f"drafter and copies, {name}"] = dj.load(target, plan=both)
    for name, engine in ways.items():
        engine.measures_drafting = False
        if name.endswith(ADAPTIVE):
            alike = [other for other in ways.values() if other.graph == engine.graph]
            engine.share_programs(alike[0])
            engine.warm_up("greedy")
            engine.time_drafting()
    return ways


def measure(
    ways: Mapping[str, Any], prompts: Sequence[str], tokens: int, pairs: int
) -> dict[str, Any]:
    """Return tokens per second of each way, its ratio over plain, and its tokens per step.

    Args:
      prompts: the prompts that are decoded at once.
    """
    last: dict[str, list[Any]] = {}

    def seconds(name: str) -> float:
        engine = ways[name]
        ids = [engine.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
        last[name] = engine.generate_many(ids, max_tokens=tokens)
        decoded = sum(len(x.token_ids) - 1 for x in last[name])
        return max(x.stats.decode_s for x in last[name]) / decoded

    def summed(name: str, count: str) -> int:
        return sum(getattr(result.stats, count) for result in last[name])

    samples = interleaved({name: lambda name=name: seconds(name) for name in ways}, pairs)
    answers = {name: [x.token_ids for x in results] for name, results in last.items()}
    rounds = {n: max(summed(n, "rounds"), 1) for n in last}
    return {
        "tokens": sum(map(len, answers["plain"])),
        "different": [name for name, token_ids in answers.items() if token_ids != answers["plain"]],
        "tokens_per_s": {n: 1 / statistics.median(numbers) for n, numbers in samples.items()},
        "over_plain": {n: ratio(samples, "plain", n).to_json() for n in samples},
        "acceptance_length": {n: 1 + summed(n, "accepted") / rounds[n] for n in last},
        "drafts_per_round": {n: summed(n, "drafted") / rounds[n] for n in last},
        "plain_steps": {n: summed(n, "plain_steps") for n in last},
        "copied": {n: summed(n, "copied") for n in last},
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure every prompt; print medians over the prompts of a kind. 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--blocks", default="2,3,4,8")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    blocks = [*map(int, options.blocks.split(","))]
    ways = engines(options.target, options.weights, blocks, options.rows)
    by_kind: dict[str, list[Any]] = {}
    for kind, parts in batches(options.rows).items():
        by_kind[kind] = [measure(ways, part, options.tokens, options.pairs) for part in parts]
    rows = []
    for name in ways:
        cells = [
            statistics.median(each["over_plain"][name]["median"] for each in cases)
            for cases in by_kind.values()
        ]
        rows.append([name, *(f"{cell:.2f}" for cell in cells)])
    print("\n".join(markdown(f"speed over plain | {' | '.join(by_kind)}", rows)))
    different = [each["different"] for cases in by_kind.values() for each in cases]
    plans = {name: dataclasses.asdict(engine.plan) for name, engine in ways.items()}
    costs = {name: engine.core.meter.value for name, engine in ways.items() if ADAPTIVE in name}
    figures = {"target": options.target, "kinds": by_kind, "plans": plans, "costs": costs}
    write_result(options.json, "copies", figures | {"load": os.getloadavg()[0]})
    return 1 if any(different) else 0


if __name__ == "__main__":
    sys.exit(main())
