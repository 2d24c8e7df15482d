"""Drafts copied from the text, beside a trained drafter and none, by kind of prompt.

    python -m benchmarks.copies [--target smollm2] [--weights packed] [--blocks 8] [--json OUT]

Copy-heavy prompts ask for text that the prompt has: an edit of code, a quotation, a tool's result.
All ways decode every prompt in turn, greedily, and their outputs are compared.
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


def engines(target: str, weights: str, blocks: Sequence[int]) -> dict[str, Any]:
    """Return engines of one target by name: without a drafter, with its own, and with copies."""
    import dflash_jax as dj

    plan = dj.Plan(max_length=768, weights=weights)
    found = {"plain": dj.load(target, None, plan=plan), "drafter": dj.load(target, plan=plan)}
    for block in blocks:
        wide = dataclasses.replace(plan, block=block)
        found[f"ngram, block {block}"] = dj.load(target, "ngram", plan=wide)
        both = dataclasses.replace(wide, ngram=4)
        found[f"drafter and copies, block {block}"] = dj.load(target, plan=both)
    for engine in found.values():
        engine.measures_drafting = False
    return found


def measure(ways: Mapping[str, Any], prompt: str, tokens: int, pairs: int) -> dict[str, Any]:
    """Return tokens per second of each way, its ratio over plain, and its tokens per step."""
    last: dict[str, Any] = {}

    def seconds(name: str) -> float:
        engine = ways[name]
        ids = engine.chat_ids([{"role": "user", "content": prompt}])
        last[name] = engine.generate(ids, max_tokens=tokens)
        return 1 / last[name].stats.tokens_per_s

    samples = interleaved({name: lambda name=name: seconds(name) for name in ways}, pairs)
    wanted = last["plain"].token_ids
    different = [name for name, result in last.items() if result.token_ids != wanted]
    return {
        "tokens": len(wanted),
        "different": different,
        "tokens_per_s": {n: 1 / statistics.median(numbers) for n, numbers in samples.items()},
        "over_plain": {n: ratio(samples, "plain", n).to_json() for n in samples},
        "acceptance_length": {n: r.stats.acceptance_length for n, r in last.items()},
        "copied": {n: r.stats.copied for n, r in last.items()},
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure every prompt; print medians over the prompts of a kind. 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--blocks", default="8")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    ways = engines(options.target, options.weights, [*map(int, options.blocks.split(","))])
    found: dict[str, list[Any]] = {}
    for kind, prompts in PROMPTS.items():
        found[kind] = [measure(ways, prompt, options.tokens, options.pairs) for prompt in prompts]
    rows = []
    for name in ways:
        cells = [
            statistics.median(each["over_plain"][name]["median"] for each in cases)
            for cases in found.values()
        ]
        rows.append([name, *(f"{cell:.2f}" for cell in cells)])
    print("\n".join(markdown(f"speed over plain | {' | '.join(found)}", rows)))
    different = [each["different"] for cases in found.values() for each in cases]
    plans = {name: dataclasses.asdict(engine.plan) for name, engine in ways.items()}
    figures = {"target": options.target, "kinds": found, "plans": plans}
    write_result(options.json, "copies", figures | {"load": os.getloadavg()[0]})
    return int(any(different))


if __name__ == "__main__":
    sys.exit(main())
