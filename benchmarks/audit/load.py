"""Load on the engine: many requests of every kind, without leaks.

Random lengths, settings and cancellations over a fixed number of rows. Every greedy output must
equal the output of the request alone, and a cancelled one a prefix of it. No row, request or
prefix may leak, nothing may compile after the warm-up, and host memory must stay flat over the
second half.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dflash_jax as dj
from benchmarks.audit.lossless import heldout_prompts
from benchmarks.environment import write_result
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.handle import RequestHandle

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"speculative": False},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.3},
)
CANCELLED = 0.15  # share of the requests


@dataclasses.dataclass
class Traffic:
    """Counts of requests and of failures."""

    requests: int = 0
    greedy: int = 0
    cancelled: int = 0
    tokens: int = 0
    different: int = 0
    leaked: int = 0
    compiled: int = 0
    hit_tokens: int = 0
    seconds: float = 0.0  # without the warm-up
    memory: tuple[int, int] = (0, 0)  # resident bytes after the first half, and at the end

    @property
    def growth(self) -> float:
        """Growth of host memory over the second half, as a fraction."""
        return self.memory[1] / self.memory[0] - 1 if self.memory[0] else 0.0

    @property
    def good(self) -> bool:
        """Whether every check but that of memory passed."""
        return not (self.different or self.leaked or self.compiled)

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return dataclasses.asdict(self) | {"growth": self.growth}


@dataclasses.dataclass
class _Running:
    live: RequestHandle
    prompt: int
    kind: int
    cancel_at: int | None  # turns from now


def alone(engine: Engine, prompts: Sequence[Sequence[int]], most: int) -> dict[Any, list[int]]:
    """Return the full outputs of greedy requests run alone, by prompt and kind."""
    greedy = [k for k, options in enumerate(KINDS) if not options.get("temperature")]
    return {
        (p, k): engine.generate(prompt, max_tokens=most, ignore_eos=True, **KINDS[k]).token_ids
        for p, prompt in enumerate(prompts)
        for k in greedy
    }


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    requests: int,
    most: int,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Traffic:
    """Run the traffic; about as many requests wait as have rows.

    Args:
      report: called with a progress line every hundred requests.
    """
    rng, traffic = np.random.default_rng(seed), Traffic()
    engine.warm_up("greedy", "sampled", "penalized")
    truth, programs = alone(engine, prompts, most), dict(engine.core.runner.executables)
    running: list[_Running] = []
    started = time.perf_counter()
    while traffic.requests < requests or running:
        while traffic.requests < requests and len(running) < 2 * engine.plan.rows:
            running.append(_submit(engine, prompts, rng, most))
            traffic.requests += 1
            if traffic.requests % 100 == 0:
                report(f"{traffic.requests}/{requests} requests, {traffic.different} differ")
            if traffic.requests == requests // 2:
                traffic.memory = (resident(), 0)
        engine.advance()
        for one in running:
            if one.cancel_at is not None and not one.live.done:
                one.cancel_at -= 1
                if one.cancel_at < 0:
                    one.live.close()
        for one in [one for one in running if one.live.done]:
            running.remove(one)
            _judge(one, truth, traffic)
    while engine.core.busy:
        engine.advance()
    traffic.memory = (traffic.memory[0], resident())
    traffic.leaked = engine.core.active + engine.core.queued
    traffic.compiled = len(engine.core.runner.executables.keys() ^ programs.keys())
    if engine.core.prefix_cache is not None:
        traffic.hit_tokens = engine.core.prefix_cache.counters.hit_tokens
    traffic.seconds = time.perf_counter() - started
    return traffic


def _submit(
    engine: Engine, prompts: Sequence[Sequence[int]], rng: np.random.Generator, most: int
) -> _Running:
    prompt, kind = int(rng.integers(len(prompts))), int(rng.integers(len(KINDS)))
    live = engine.submit(
        prompts[prompt],
        max_tokens=int(rng.integers(1, most + 1)),
        seed=int(rng.integers(2**32)),
        ignore_eos=True,
        **KINDS[kind],
    )
    cancel_at = int(rng.integers(12)) if rng.random() < CANCELLED else None
    return _Running(live, prompt, kind, cancel_at)


def _judge(one: _Running, truth: dict[Any, list[int]], traffic: Traffic) -> None:
    result = one.live.result()
    traffic.tokens += len(result.token_ids)
    traffic.cancelled += result.finish_reason == "cancelled"
    wanted = truth.get((one.prompt, one.kind))
    if wanted is None:
        return
    traffic.greedy += 1
    length = one.live.sequence.request.params.max_tokens
    whole = result.finish_reason == "cancelled" or len(result.token_ids) == length
    traffic.different += not whole or result.token_ids != wanted[: len(result.token_ids)]


def resident() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def load(words: Sequence[str]) -> int:
    """Run the traffic on the shipped pair and write the report; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit load")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_load.json"))
    options = parser.parse_args(words)
    plan = dj.Plan(rows=options.rows, max_length=320, chunk=16, prefix_cache=1 << 26)
    engine = dj.load(plan=plan)
    engine.measures_drafting = False
    rng = np.random.default_rng(1)
    texts = heldout_prompts(engine, options.prompts)
    prompts = [ids[: int(rng.integers(1, 260))] for ids in texts]
    counts = {"requests": options.requests, "most": options.max_tokens}
    traffic = drive(engine, prompts, **counts, report=lambda line: print(line, file=sys.stderr))
    report = {"plan": json.loads(engine.plan.to_json()), "traffic": traffic.to_json()}
    write_result(options.out, "soak_load", report)
    print(json.dumps(traffic.to_json(), indent=1))
    return 0 if traffic.good and traffic.growth < 0.01 else 1
