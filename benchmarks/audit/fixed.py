"""Fixed scenarios: grids in which speculative output must equal plain output, and mixed load.

`shipped`: the shipped pair in float32 and bfloat16, with four blocks; prompts of one token, around
chunk boundaries, and held-out conversations; its own drafter, a random one, an oracle that is
always right and an adversary that is always wrong.

`families`: small random models with every feature of their family; prompts of one token and of many
windows, prefilled in chunks of 1, 7, 64 and 512 tokens; blocks of four widths; at least 5,000
tokens for each family and dtype under random acceptance patterns.

`sampled`: the same models with a drafter of every kind in turn; four temperatures, each with top-k,
top-p, min-p, penalties and a grammar; drafts follow the plain output by random acceptance patterns.

`load`: many requests of random lengths, settings and cancellations over a fixed number of rows.
Every output must equal the output of the request alone, and a cancelled one a prefix of it.
No row, request or prefix may leak, nothing may compile after the warm-up, and host memory must stay
flat over the second half.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflash_jax as dj
from benchmarks.audit import models
from benchmarks.audit.models import DRAFTERS, FAMILIES, Setup
from benchmarks.cases import heldout_chats
from benchmarks.environment import write_result
from dflash_jax import Plan
from dflash_jax.bench.compare import LosslessCheck
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.plan import Weights
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    random_params,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)

DTYPES = ("float32", "bfloat16")
BLOCKS, CHUNK = (2, 5, 8, 12), 64  # of the shipped pair
BOUNDARIES = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)
BLOCK_OF_CHUNK = {1: 5, 7: 8, 64: 16, 512: 2}  # of random models
OWN_DRAFTS = 7  # chunk size that also runs with the drafter's own drafts
Checks = Iterator[tuple[tuple[str, ...], LosslessCheck]]  # with the cells where each counts


@dataclasses.dataclass
class Tally:
    """Counts of compared prompts and tokens under one heading."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    different: int = 0

    def add(self, check: LosslessCheck) -> None:
        self.prompts += 1
        self.tokens += len(check.speculative.token_ids)
        self.rounds += check.speculative.stats.rounds
        self.different += not check.equal


def prompts(engine: Engine, chats: int) -> list[list[int]]:
    """Return prompts around every chunk boundary, and whole conversations."""
    found = heldout_chats(engine.chat_ids, 40)
    text = list(itertools.chain.from_iterable(found))
    starts = np.random.default_rng(0).integers(0, len(text) - 2 * CHUNK - 2, len(BOUNDARIES))
    cut = [text[s : s + n] for s, n in zip(starts.tolist(), BOUNDARIES, strict=True)]
    return cut + found[:chats]


def shipped_checks(plan: Plan, max_tokens: int, chats: int) -> Checks:
    """Decode every prompt with every drafter of one plan of the shipped pair."""
    real = dj.load(plan=plan)
    real.measures_drafting = False
    params = random_params(real.graph.pair, dtype=real.plan.dtype, seed=1)
    drafter = jax.device_put(params["drafter"])
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    scripted = scripted_engine(real)
    trained = real.params
    for prompt in prompts(real, chats):
        real.update_params(trained)
        plain = real.generate(prompt, speculative=False, **options)
        yield ("shipped",), LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        real.update_params(trained | {"drafter": drafter})
        yield ("random",), LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        truth = [*prompt, *plain.token_ids]
        wrong = [(t + 1) % real.graph.config.vocab_size for t in truth]
        for name, script in (("oracle", truth), ("adversarial", wrong)):
            set_script(scripted, script)
            yield (name,), LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)


def pairs() -> Iterator[tuple[str, TargetConfig, DrafterConfig]]:
    """Return every family with a v1 drafter, and every other drafter with a Qwen3."""
    for name, target in FAMILIES.items():
        yield name, target, tiny_drafter(target)
    for kind in ("dflash2", "dspark", "domino"):
        target = tiny_target()
        yield f"{kind} drafter", target, tiny_drafter(target, kind, **DRAFTERS[kind][1])


def family_checks(target: TargetConfig, drafter: DrafterConfig, plan: Plan, tokens: int) -> Checks:
    """Decode `tokens` tokens of a random pair with one plan, under random acceptance patterns."""
    rng, vocab = np.random.default_rng(plan.chunk), target.vocab_size
    target = dataclasses.replace(target, max_length=max(target.max_length, plan.max_length))
    real = random_engine(target, drafter, plan, seed=plan.chunk)
    scripted = scripted_engine(real)
    for length in (1, 130, 530):
        prompt = rng.integers(0, vocab, length).tolist()
        options: dict[str, Any] = {"max_tokens": tokens // 3, "ignore_eos": True}
        plain = scripted.generate(prompt, speculative=False, **options)
        pattern = rng.integers(0, plan.block, tokens).tolist()
        truth = [*prompt, *plain.token_ids]
        set_script(scripted, force_acceptance(truth, length, pattern, vocab))
        yield ("",), LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)
        if length == 130 and plan.chunk == OWN_DRAFTS:
            yield ("",), LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)


def run(grid: Iterator[tuple[str, str, Callable[[], Checks]]], suite: str, out: Path) -> int:
    """Make all checks of a grid and write the result.

    Args:
      grid: heading in the result, remaining description, and checks of each plan.

    Returns:
      1 if a single token differs.
    """
    started, tallies, every = time.perf_counter(), dict[str, Tally](), Tally()
    for heading, place, checks in grid:
        for names, check in checks():
            every.add(check)
            keys = [" ".join(filter(None, (heading, name))) for name in names]
            for key in keys:
                tallies.setdefault(key, Tally()).add(check)
            if not check.equal:
                where = f"{'; '.join(keys)}{place}"
                print(f"DIFFERS: {where}, token {check.first_difference}, {check.prompt}")
        print(f"{heading}{place}: {every.tokens} tokens so far", flush=True)
    different = every.different
    figures = {
        "tokens": every.tokens,
        "different_prompts": different,
        "seconds": round(time.perf_counter() - started, 1),
        "cases": {key: dataclasses.asdict(t) for key, t in tallies.items()},
    }
    write_result(out, suite, figures)
    print(f"{every.tokens} tokens compared, {different} prompts differ; written to {out}")
    return 1 if different else 0


def shipped(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit shipped")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_lossless.json"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chats", type=int, default=4, help="held-out conversations per plan")
    options = parser.parse_args(words)

    def grid() -> Iterator[tuple[str, str, Callable[[], Checks]]]:
        for dtype, block in itertools.product(DTYPES, BLOCKS):
            plan = Plan(dtype=dtype, block=block, chunk=CHUNK, max_length=1024)
            checks = functools.partial(shipped_checks, plan, options.max_tokens, options.chats)
            yield f"{dtype} block {block}", "", checks

    return run(grid(), "soak_lossless", options.out)


def families(words: Sequence[str]) -> int:
    known = [name for name, *_ in pairs()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit families")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_families.json"))
    parser.add_argument("--tokens", type=int, default=1260, help="for each family, dtype and chunk")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="FAMILY")
    options = parser.parse_args(words)

    def grid() -> Iterator[tuple[str, str, Callable[[], Checks]]]:
        wanted = [pair for pair in pairs() if pair[0] in options.only]
        for (name, *pair), dtype in itertools.product(wanted, options.dtypes):
            for chunk, block in BLOCK_OF_CHUNK.items():
                length = 544 + options.tokens // 3
                plan = Plan(max_length=length, chunk=chunk, block=block, dtype=dtype)
                checks = functools.partial(family_checks, *pair, plan, options.tokens)
                yield f"{name}, {dtype}", f", chunk {chunk}, block {block}", checks

    return run(grid(), "soak_families", options.out)


TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 12},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "grammar": {"structured": {"regex": "([a-f]{3}[0-9],){4,40}"}},
}


def sampled_checks(engine: Engine, tokens: int) -> Checks:
    """Decode `tokens` tokens at each temperature with each filter."""
    rng, vocab = np.random.default_rng(5), engine.graph.config.vocab_size
    for temperature, (name, filters) in itertools.product(TEMPERATURES, FILTERS.items()):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature}
        options |= {"seed": int(rng.integers(1 << 30)), "ignore_eos": name != "grammar"} | filters
        plain = engine.generate(prompt, speculative=False, **options)
        pattern = rng.integers(0, engine.plan.block, tokens).tolist()
        truth = [*prompt, *plain.token_ids]
        set_script(engine, force_acceptance(truth, len(prompt), pattern, vocab))
        drafted = engine.generate(prompt, **options)
        yield (f"temperature {temperature}, {name}",), LosslessCheck(tuple(prompt), drafted, plain)


def sampled(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit sampled")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak_sampled.json"))
    parser.add_argument("--tokens", type=int, default=60, help="of each answer")
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    options = parser.parse_args(words)
    kinds = itertools.cycle(DRAFTERS)

    def checks(setup: Setup) -> Checks:
        engine = scripted_engine(models.random_engine(setup, Plan(**setup.plan)))
        for cell, check in sampled_checks(engine, options.tokens):
            yield (*cell, setup.family, f"{setup.drafter} drafter"), check

    def grid() -> Iterator[tuple[str, str, Callable[[], Checks]]]:
        for family, kind in zip(FAMILIES, kinds, strict=False):
            plan = {"max_length": 160, "chunk": 16, "block": 5}
            setup = Setup(family=family, drafter=kind, plan=plan, syntax="")
            if family in options.only:
                yield "", f"{family} + {kind}", functools.partial(checks, setup)

    return run(grid(), "soak_sampled", options.out)


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"speculative": False},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.3, "seed": 2},
)
CANCELLED = 0.15  # share of the requests


@dataclasses.dataclass
class Traffic:
    """Counts of requests and of failures."""

    requests: int = 0
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
        return dataclasses.asdict(self) | {"growth": self.growth}


@dataclasses.dataclass
class _Running:
    live: RequestHandle
    prompt: int
    kind: int
    cancel_at: int | None  # turns from now


def alone(engine: Engine, prompts: Sequence[Sequence[int]], most: int) -> dict[Any, list[int]]:
    """Return the full outputs of requests run alone without drafting, by prompt and kind."""
    common: dict[str, Any] = {"max_tokens": most, "ignore_eos": True, "speculative": False}
    return {
        (p, k): engine.generate(prompt, **options | common).token_ids
        for p, prompt in enumerate(prompts)
        for k, options in enumerate(KINDS)
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
        ignore_eos=True,
        **KINDS[kind],
    )
    cancel_at = int(rng.integers(12)) if rng.random() < CANCELLED else None
    return _Running(live, prompt, kind, cancel_at)


def _judge(one: _Running, truth: dict[Any, list[int]], traffic: Traffic) -> None:
    result = one.live.result()
    traffic.tokens += len(result.token_ids)
    traffic.cancelled += result.finish_reason == "cancelled"
    wanted = truth[one.prompt, one.kind]
    length = one.live.sequence.request.params.max_tokens
    whole = result.finish_reason == "cancelled" or len(result.token_ids) == length
    traffic.different += not whole or result.token_ids != wanted[: len(result.token_ids)]


def resident() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def load(words: Sequence[str]) -> int:
    """Run the traffic on a pair and write the report; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit load")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--weights", default="auto", choices=typing.get_args(Weights))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, help="by default, of tiny only, soak_load.json")
    options = parser.parse_args(words)
    if options.target == "tiny" and not options.out:
        options.out = Path("benchmarks/results/soak_load.json")
    plan = dj.Plan(
        rows=options.rows, max_length=320, chunk=16, prefix_cache=1 << 26, weights=options.weights
    )
    engine = dj.load(options.target, options.drafter, plan=plan)
    engine.measures_drafting = False
    rng = np.random.default_rng(1)
    texts = heldout_chats(engine.chat_ids, options.prompts)
    prompts = [ids[: int(rng.integers(1, 260))] for ids in texts]
    counts = {"requests": options.requests, "most": options.max_tokens}
    traffic = drive(engine, prompts, **counts, report=lambda line: print(line, file=sys.stderr))
    resolved = json.loads(engine.plan.to_json())
    resolved.pop("stored", None)  # a line for every matrix
    pair = {"target": options.target, "drafter": options.drafter}
    report = pair | {"plan": resolved, "traffic": traffic.to_json()}
    write_result(options.out, "soak_load", report)
    print(json.dumps(traffic.to_json(), indent=1))
    return 0 if traffic.good and traffic.growth < 0.01 else 1
