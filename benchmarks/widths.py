"""Time of a step that verifies a block over that of a step of one token, by tokens of the block.

    python -m benchmarks.widths MODEL... [--weights packed,int8] [--widths 4,8,16,64] [--json OUT]

A drafted step verifies at the first of these costs, so their ratio bounds what drafting can give.
All steps are timed in turn. Drafts repeat the anchor, which costs nothing; none is committed.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import interleaved, ratio, spread

PROMPT = list(range(5, 37))
MOST = 256


class Repeat:
    """A drafter that repeats the anchor (a `dj.graph` drafter)."""

    taps = ()

    def empty(self, make: Any) -> tuple[()]:
        """Return no state."""
        return ()

    def observe(self, params: Any, state: Any, tokens: Any, taps: Any, start: Any) -> tuple[()]:
        """Keep nothing."""
        return ()

    def propose(
        self, params: Any, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any
    ) -> tuple[Any, tuple[()]]:
        """Draft the anchor at every place."""
        import jax.numpy as jnp

        return sampler.certain(jnp.repeat(anchor[:, None], sampler.num_drafts, axis=1)), ()


def measure(model: str, weights: str, widths: Sequence[int], pairs: int) -> dict[str, Any]:
    """Return milliseconds of steps of each width, their ratios over one token, and the plan."""
    import dflash_jax as dj
    from dflash_jax.engine.break_even import Stopwatch, Timed

    loaded = dj.load(model, None, plan=dj.Plan(max_length=MOST, weights=weights))
    pair = dataclasses.replace(loaded.graph.pair, drafter=Repeat())
    graph = dj.Graph(pair, dataclasses.replace(loaded.plan, block=max(widths)))
    params = {"target": loaded.params["target"], "drafter": {}}
    engine = dj.Engine(graph, params, tokenizer=loaded.tokenizer)
    engine.warm_up()
    watch = Stopwatch(engine.core.runner)
    watch.feed()
    steps = {n: Timed(1, n) for n in (1, *widths)}
    calls = {str(n): lambda step=step: 1e3 * watch.step_seconds(step) for n, step in steps.items()}
    samples = interleaved(calls, pairs)
    return {
        "step_ms": {name: spread(numbers).to_json() for name, numbers in samples.items()},
        "over_one": {str(n): ratio(samples, str(n), "1").to_json() for n in widths},
        "plan": dataclasses.asdict(graph.plan),
        "load": os.getloadavg()[0],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure every model with every kind of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--weights", default="packed,int8")
    parser.add_argument("--widths", default="4,8,16,64")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    widths = [int(width) for width in options.widths.split(",")]
    cases: dict[str, Any] = {}
    for model in options.models:
        for weights in options.weights.split(","):
            case = f"{Path(model).stem}, {weights}"
            cases[case] = result = measure(model, weights, widths, options.pairs)
            one = result["step_ms"]["1"]["median"]
            over = "  ".join(f"{n}: {result['over_one'][str(n)]['median']:.2f}" for n in widths)
            print(f"{case:32} one token {one:7.2f} ms; tokens over one {over}", flush=True)
    write_result(options.json, "widths", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
