"""Prefill, plain and drafted decoding beside OpenVINO GenAI, on the same GGUF file and cores.

    python -m venv OTHER && OTHER/bin/pip install openvino-genai
    dflash-jax convert smollm2 smollm2.gguf --type q8_0
    python -m benchmarks.openvino --python OTHER/bin/python smollm2.gguf [--weights packed,int8]
        [--json benchmarks/results/openvino.json]

Both sides take turns, one request each in every round, with prompts of random tokens that no
prefix cache has seen. OpenVINO runs with its defaults: where the processor multiplies bfloat16,
activations are rounded to it, and caches to int8. Ours computes what the file's float32 model
would, up to the rounding that `weights` names. Of 7 drafts 3 and 0 are accepted in turn, forced:
2.5 tokens a round. OpenVINO drafts nothing here, and is compared by its plain decoding.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import interleaved, markdown, ratio, spread
from benchmarks.workers import Worker

PROMPT, TOKENS, ROWS, PREFILL = 128, 64, 16, 512
DRAFTER = Path(__file__).parents[1] / "dflash_jax" / "data" / "smollm2" / "drafter"
ACCEPTED = (3, 0)  # drafts by round
CELLS = ("plain, one row", "drafted, one row", f"plain, {ROWS} rows", f"prefill of {PREFILL}")


class Prompts:
    """Prompts of random tokens, no two alike."""

    def __init__(self, vocab_size: int):
        self._rng, self._size = np.random.default_rng(0), vocab_size

    def draw(self, rows: int, length: int) -> list[list[int]]:
        """Return prompts of a length for some rows."""
        return self._rng.integers(100, self._size, (rows, length)).tolist()


def ours(model: str, weights: str, prompts: Prompts) -> dict[str, Callable[[], float]]:
    """Return calls that measure tokens per second of our engine in each cell."""
    import dflash_jax as dj
    from benchmarks.modes import generate
    from dflash_jax.testing import force_acceptance, scripted_engine, set_script

    plan = dj.Plan(max_length=PREFILL + TOKENS, weights=weights, block=8)
    one = scripted_engine(dj.load(model, DRAFTER, plan=plan))
    many = dj.load(model, None, plan=dj.Plan(max_length=256, weights=weights, rows=ROWS))
    vocab = one.graph.config.vocab_size
    for engine in (one, many):
        engine.measures_drafting = False
        engine.warm_up("greedy", "chunks")

    def decode(speculative: bool) -> float:
        [prompt] = prompts.draw(1, PROMPT)
        options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
        if speculative:
            truth = one.generate(prompt, speculative=False, **options).token_ids
            set_script(one, force_acceptance([*prompt, *truth], PROMPT, ACCEPTED, vocab))
        run = generate(one, prompt, speculative=speculative, **options)
        return (TOKENS - 1) / run.decode_s

    def batch() -> float:
        results = many.generate_many(prompts.draw(ROWS, PROMPT), max_tokens=TOKENS, ignore_eos=True)
        return ROWS * (TOKENS - 1) / max(result.stats.decode_s for result in results)

    def prefill() -> float:
        [prompt] = prompts.draw(1, PREFILL)
        return PREFILL / generate(one, prompt, max_tokens=1).prefill_s

    calls = (lambda: decode(False), lambda: decode(True), batch, prefill)
    return dict(zip(CELLS, calls, strict=True))


def theirs(worker: Worker, prompts: Prompts) -> dict[str, Callable[[], float]]:
    """Return calls that measure tokens per second of OpenVINO in each cell."""

    def ask(rows: int, length: int, tokens: int) -> dict[str, Any]:
        return worker.ask(json.dumps({"ids": prompts.draw(rows, length), "tokens": tokens}))

    def decode(rows: int) -> float:
        return rows * (TOKENS - 1) / ask(rows, PROMPT, TOKENS)["decode_s"]

    calls = (
        lambda: decode(1),
        lambda: decode(1),
        lambda: decode(ROWS),
        lambda: PREFILL / ask(1, PREFILL, 1)["prefill_s"],
    )
    return dict(zip(CELLS, calls, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    """Measure every cell with every kind of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="FILE", help="a GGUF file of SmolLM2-135M")
    parser.add_argument("--python", required=True, help="that has openvino-genai")
    parser.add_argument("--weights", default="packed,int8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    command = [
        options.python,
        "-P",
        str(Path(__file__).with_name("openvino_worker.py")),
        options.model,
    ]
    cores = len(os.sched_getaffinity(0))
    prompts = Prompts(49_000)
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    with Worker(command, cores) as worker:
        found["openvino_genai"] = worker.first["version"]
        rival = theirs(worker, prompts)
        engines = {kind: ours(options.model, kind, prompts) for kind in options.weights.split(",")}
        rows = []
        for cell in CELLS:
            calls = {"OpenVINO": rival[cell]} | {k: calls[cell] for k, calls in engines.items()}
            samples = interleaved(calls, options.rounds)
            speeds = {name: spread(numbers).to_json() for name, numbers in samples.items()}
            over = {kind: ratio(samples, kind, "OpenVINO").to_json() for kind in engines}
            found[cell] = {"tokens_per_s": speeds, "over_openvino": over}
            rows.append([cell, *(f"{s['median']:,.0f}" for s in speeds.values())])
            rows[-1] += [f"{s['median']:.2f}" for s in over.values()]
    headings = ["tokens/s", "OpenVINO", *engines, *(f"{kind} over it" for kind in engines)]
    print("\n".join(markdown(" | ".join(headings), rows)))
    write_result(options.json, "openvino", {"cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
