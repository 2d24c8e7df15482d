"""Cost of sampling: decode steps with and without it, and the filters alone.

    python -m benchmarks.sampling [--pairs 9] [--pin 0] [--json benchmarks/results/sampling.json]

Steps are those of the shipped pair with one and four rows: CPU seconds per draft-verify round, over
those of greedy rows. In "1 of 4 rows" one row samples and the others are greedy. The filters run
over 16 positions of 151,936 logits, as ratios of a softmax; the logits are a peaked distribution,
where the search ends at once, and a flat one, where it bisects.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflash_jax as dj
from benchmarks.environment import environment
from benchmarks.paired import interleaved, ratio, spread
from dflash_jax.graph.build import jit
from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps.filters import filtered

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_k 20, top_p 0.9": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "temperature 1, top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "logprobs 3": {"logprobs": 3},
    "presence_penalty 0.5": {"presence_penalty": 0.5},
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
PLACES, VOCAB = 16, 151_936
SHORT, LONG = 8, 160  # tokens; a step's cost is the slope between them


def step_seconds(engine: dj.Engine, options: dict[str, Any], asking: int) -> Callable[[], float]:
    """Return a function that measures CPU seconds per round; `asking` rows have the options."""
    prompt = engine.chat_ids([{"role": "user", "content": "List three colours."}])

    def run(tokens: int) -> tuple[float, int]:
        started, common = time.process_time(), {"max_tokens": tokens, "ignore_eos": True, "seed": 1}
        handles = [
            engine.submit(prompt, **common, **(options if row < asking else {}))
            for row in range(engine.plan.rows)
        ]
        while not all(handle.done for handle in handles):
            engine.advance()
        rounds = max(handle.result().stats.rounds for handle in handles)
        return time.process_time() - started, rounds

    def measure() -> float:
        (short, first), (long, last) = run(SHORT), run(LONG)
        return (long - short) / (last - first)

    return measure


def measure_steps(pairs: int) -> dict[str, Any]:
    """Measure CPU seconds per round for every kind of request, and ratios over greedy."""
    found: dict[str, Any] = {}
    for rows, asking in ((1, 1), (4, 4), (4, 1)):
        engine = dj.load("tiny", plan=dj.Plan(rows=rows))
        engine.measures_drafting = False
        calls = {name: step_seconds(engine, o, asking) for name, o in REQUESTS.items()}
        samples = interleaved(calls, pairs)
        where = f"{asking} of {rows} rows"
        found[where] = {}
        for name in REQUESTS:
            milliseconds = spread([x * 1e3 for x in samples[name]])
            over = ratio(samples, name, "greedy")
            found[where][name] = {"ms": milliseconds.to_json(), "over_greedy": over.to_json()}
            print(f"{where:12} {name:38} {milliseconds.median:7.2f} ms  x{over.median:.2f}")
    return found


def measure_filters(pairs: int) -> dict[str, Any]:
    """Measure CPU seconds of the filters alone, as ratios of a softmax."""
    noise = np.random.default_rng(0).standard_normal((PLACES, 1, VOCAB)).astype(np.float32)
    found: dict[str, Any] = {}
    for shape, scale in (("peaked", 8.0), ("flat", 1.0)):
        x = jnp.asarray(noise * scale)
        calls = {"softmax": (jit(lambda x: jax.nn.softmax(x, axis=-1)), (x,))}
        calls |= {name: (jit(filtered), (x, _rules(**o))) for name, o in FILTERS.items()}
        samples = interleaved({name: timed(*call) for name, call in calls.items()}, 3 * pairs)
        found[shape] = {}
        for name in calls:
            milliseconds = spread([x * 1e3 for x in samples[name]])
            over = ratio(samples, name, "softmax")
            found[shape][name] = {"ms": milliseconds.to_json(), "over_softmax": over.to_json()}
            print(f"{shape:12} {name:38} {milliseconds.median:7.2f} ms  x{over.median:.2f}")
    return found


def timed(function: Any, arguments: tuple[Any, ...]) -> Callable[[], float]:
    """Return a function that measures the CPU seconds of one call."""

    def call() -> float:
        started = time.process_time()
        jax.block_until_ready(function(*arguments))
        return time.process_time() - started

    return call


def _rules(**columns: Any) -> RowRules:
    """Return the rules of sampled rows with filters."""
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | {"top_k": 0} | columns
    whole = {"limit": 99, "max_drafts": 99, "top_k": values.pop("top_k")}
    return RowRules(
        stop_ids=jnp.full((PLACES, 1), -1, jnp.int32),
        seed=jnp.zeros((PLACES,), jnp.uint32),
        **{name: jnp.full((PLACES,), x, jnp.int32) for name, x in whole.items()},
        **{name: jnp.full((PLACES,), x, jnp.float32) for name, x in values.items()},
    )


def main() -> None:
    """Measure steps and filters and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--pin", type=int, help="the one core to run on")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pin is not None:
        os.sched_setaffinity(0, {options.pin})
    figures = {"steps": measure_steps(options.pairs), "filters": measure_filters(options.pairs)}
    if options.json:
        figures = {"environment": environment(), "pairs": options.pairs} | figures
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
