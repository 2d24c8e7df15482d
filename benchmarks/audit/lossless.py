"""Grids of prompts, blocks and drafters in which speculative output must equal plain output.

`shipped`: the shipped pair in float32 and bfloat16, with four blocks; prompts of one token, around
chunk boundaries, and held-out conversations; its own drafter, a random one, an oracle that is
always right and an adversary that is always wrong.

`families`: small random models with every feature of their family; prompts of one token and of many
windows, prefilled in chunks of 1, 7, 64 and 512 tokens; blocks of four widths; at least 5,000
tokens for each family and dtype under random acceptance patterns.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflash_jax as dj
from benchmarks.audit.setups import DRAFTERS, FAMILIES
from benchmarks.environment import write_result
from dflash_jax import Plan
from dflash_jax.bench.compare import LosslessCheck
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
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
Checks = Iterator[tuple[str, LosslessCheck]]  # with the name of what drafts


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


def heldout_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return held-out conversations of the shipped pair as token ids."""
    path = Path(dj.__file__).parent / "data" / "tiny" / "heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chats = [row for row in rows if "messages" in row][:count]
    return [
        engine.chat_ids(row["messages"], **({"tools": row["tools"]} if row.get("tools") else {}))
        for row in chats
    ]


def prompts(engine: Engine, chats: int) -> list[list[int]]:
    """Return prompts around every chunk boundary, and whole conversations."""
    found = heldout_prompts(engine, 40)
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
        real.params = trained
        plain = real.generate(prompt, speculative=False, **options)
        yield "shipped", LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        real.params = trained | {"drafter": drafter}
        yield "random", LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)
        truth = [*prompt, *plain.token_ids]
        wrong = [(t + 1) % real.graph.config.vocab_size for t in truth]
        for name, script in (("oracle", truth), ("adversarial", wrong)):
            set_script(scripted, script)
            yield name, LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)


def pairs() -> Iterator[tuple[str, TargetConfig, DrafterConfig]]:
    """Return every family with a v1 drafter, and every other drafter with a Qwen3."""
    for name, target in FAMILIES.items():
        yield name, target, tiny_drafter(target)
    for kind in ("dflash2", "dspark"):
        target = tiny_target()
        yield f"{kind} drafter", target, tiny_drafter(target, kind, **DRAFTERS[kind][1])


def family_checks(
    target: TargetConfig, drafter: DrafterConfig, plan: Plan, tokens: int
) -> Iterator[tuple[str, LosslessCheck]]:
    """Decode `tokens` tokens of a random pair with one plan, under random acceptance patterns."""
    rng, vocab = np.random.default_rng(plan.chunk), target.vocab_size
    real = random_engine(target, drafter, plan, seed=plan.chunk)
    scripted = scripted_engine(real)
    for length in (1, 130, 530):
        prompt = rng.integers(0, vocab, length).tolist()
        options: dict[str, Any] = {"max_tokens": tokens // 3, "ignore_eos": True}
        plain = scripted.generate(prompt, speculative=False, **options)
        pattern = rng.integers(0, plan.block, tokens).tolist()
        truth = [*prompt, *plain.token_ids]
        set_script(scripted, force_acceptance(truth, length, pattern, vocab))
        yield "", LosslessCheck(tuple(prompt), scripted.generate(prompt, **options), plain)
        if length == 130 and plan.chunk == OWN_DRAFTS:
            yield "", LosslessCheck(tuple(prompt), real.generate(prompt, **options), plain)


def run(grid: Iterator[tuple[str, str, Callable[[], Checks]]], suite: str, out: Path) -> int:
    """Make all checks of a grid and write the result.

    Args:
      grid: heading in the result, remaining description, and checks of each plan.

    Returns:
      1 if a single token differs.
    """
    started, tallies = time.perf_counter(), dict[str, Tally]()
    for heading, place, checks in grid:
        for name, check in checks():
            key = " ".join(filter(None, (heading, name)))
            tallies.setdefault(key, Tally()).add(check)
            if not check.equal:
                print(f"DIFFERS: {key}{place}, token {check.first_difference}, {check.prompt}")
        total = sum(t.tokens for t in tallies.values())
        print(f"{heading}{place}: {total} tokens so far", flush=True)
    different = sum(t.different for t in tallies.values())
    figures = {
        "tokens": total,
        "different_prompts": different,
        "seconds": round(time.perf_counter() - started, 1),
        "cases": {key: dataclasses.asdict(t) for key, t in tallies.items()},
    }
    write_result(out, suite, figures)
    print(f"{total} tokens compared, {different} prompts differ; written to {out}")
    return 1 if different else 0


def shipped(words: Sequence[str]) -> int:
    """Check the shipped pair."""
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
    """Check small models of every family."""
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
