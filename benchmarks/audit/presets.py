"""Presets: fixed grids of setups and scenarios, which run and are judged as drawn ones are.

`shipped`: the shipped pair in float32 and bfloat16, with four blocks; prompts of one token, around
chunk boundaries, and held-out conversations; its own drafter, a random one, an oracle that is
always right and an adversary that is always wrong.

`families`: small random models with every feature of their family; prompts of one token and of many
windows, prefilled in chunks of 1, 7, 64 and 512 tokens; blocks of four widths; random acceptance
patterns.

`sampled`: the same models with a drafter of every kind in turn; four temperatures, each with top-k,
top-p, min-p, penalties and a grammar; random acceptance patterns.

`load`: many requests of random lengths, settings and cancellations over a fixed number of rows.
Nothing may compile after the warm-up, and host memory must stay flat over the second half.
"""

import argparse
import collections
import dataclasses
import gc
import itertools
import json
import os
import random
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import dflash_jax as dj
from benchmarks.audit.models import (
    DRAFTERS,
    DTYPES,
    FAMILIES,
    GIVEN,
    SHIPPED,
    TOKENS,
    Setup,
    build,
)
from benchmarks.audit.runner import Counts, run_case
from benchmarks.audit.scenario import AuditRequest, Cancellation, Scenario
from benchmarks.cases import heldout_chats
from benchmarks.environment import write_result
from benchmarks.processes import memory_mb
from dflash_jax.plan import Weights
from dflash_jax.tokenizer import Tokenizer

SHIPPED_TARGET = Path(dj.__file__).parent / "data" / "tiny" / "target"
# Blocks and chunk of the shipped pair.
BLOCKS = (2, 5, 8, 12)
CHUNK = 64
BOUNDARIES = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)
BLOCK_OF_CHUNK = {1: 5, 7: 8, 64: 16, 512: 2}  # blocks of random models by their chunk
CHATS = 4  # held-out conversations of a setup
OWN_DRAFTS = 7  # chunk size that also runs with the drafter's own drafts
OF_QWEN3 = ("dflash2", "dspark", "domino")  # drafters that decode beside one family
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"structured": {"regex": "([a-f]{3}[0-9],){4,40}"}},
)
KINDS: tuple[dict[str, Any], ...] = (  # options of requests under load
    {},
    {},
    {},
    {"speculative": False},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.3, "seed": 2},
)
CANCELLED = 0.15  # share of the requests under load
GROWTH = 0.01  # share by which host memory may grow over the second half of a load


Grid = Iterator[tuple[Setup, dict[str, Scenario]]]  # scenarios of a setup by heading


def shipped(tokens: int) -> Grid:
    """Yield the setups of the shipped pair, each with and without scripted drafts."""
    tokenizer = Tokenizer.from_directory(SHIPPED_TARGET)
    assert tokenizer is not None
    prompts = _boundary_prompts(heldout_chats(tokenizer.chat, 40))
    for dtype, block in itertools.product(DTYPES[:2], BLOCKS):
        plan = {"dtype": dtype, "block": block, "chunk": CHUNK, "max_length": 1024}
        setup = Setup(family=SHIPPED, plan=plan, variants=(), prompt_logprobs=False)
        own = _greedy(prompts, tokens)
        yield (
            dataclasses.replace(setup, scripted=False),
            {"shipped": own, "random": dataclasses.replace(own, drafter_seed=1)},
        )
        oracle = _greedy(prompts, tokens, accepted=(block - 1,))
        yield setup, {"oracle": oracle, "adversarial": _greedy(prompts, tokens, accepted=(0,))}


def _boundary_prompts(conversations: list[list[int]]) -> list[list[int]]:
    """Return prompts around every chunk boundary, and the first conversations."""
    text = list(itertools.chain.from_iterable(conversations))
    rng = random.Random(0)
    starts = [rng.randrange(len(text) - max(BOUNDARIES)) for _ in BOUNDARIES]
    cut = [text[start : start + n] for start, n in zip(starts, BOUNDARIES, strict=True)]
    return cut + conversations[:CHATS]


def _greedy(
    prompts: Sequence[Sequence[int]], tokens: int, *, accepted: tuple[int, ...] = ()
) -> Scenario:
    """Return a scenario that decodes prompts one after the other."""
    options = {"max_tokens": tokens, "ignore_eos": True}
    requests = [
        AuditRequest(prompt=tuple(prompt), options=options, accepted=accepted) for prompt in prompts
    ]
    return Scenario(requests=tuple(requests))


def families(tokens: int) -> Grid:
    """Yield every family with a v1 drafter, and every other drafter with a Qwen3."""
    pairs = [(family, "dflash") for family in FAMILIES]
    pairs += [("qwen3, two windows", drafter) for drafter in OF_QWEN3]
    for (family, drafter), dtype in itertools.product(pairs, DTYPES[:2]):
        for chunk, block in BLOCK_OF_CHUNK.items():
            length = 544 + tokens
            setup = Setup(
                family=family,
                drafter=drafter,
                plan={"max_length": length, "chunk": chunk, "block": block, "dtype": dtype},
                syntax="",
                variants=(),
                prompt_logprobs=False,
            )
            rng = random.Random(chunk)
            requests: list[AuditRequest] = []
            for size in (1, 130, 530):
                prompt = rng.choices(range(len(TOKENS)), k=size)
                pattern = tuple(rng.choices(range(block), k=tokens))
                requests += _greedy([prompt], tokens, accepted=pattern).requests
                if size == 130 and chunk == OWN_DRAFTS:
                    requests += _greedy([prompt], tokens).requests
            yield setup, {"": Scenario(requests=tuple(requests))}


def sampled(tokens: int) -> Grid:
    """Yield every family, with a drafter of each kind in turn."""
    for family, drafter in zip(FAMILIES, itertools.cycle(DRAFTERS), strict=False):
        plan = {"max_length": 160, "chunk": 16, "block": 5}
        setup = Setup(family=family, drafter=drafter, plan=plan, syntax="", prompt_logprobs=False)
        rng = random.Random(5)
        requests = []
        for temperature, filters in itertools.product(TEMPERATURES, FILTERS):
            options = {"max_tokens": tokens, "temperature": temperature} | filters
            options["seed"] = rng.randrange(1 << 30)
            options["ignore_eos"] = "structured" not in filters
            prompt = tuple(rng.choices(range(len(TOKENS)), k=rng.randrange(1, 60)))
            pattern = tuple(rng.choices(range(plan["block"]), k=tokens))
            requests.append(AuditRequest(prompt=prompt, options=options, accepted=pattern))
        yield setup, {"": Scenario(requests=tuple(requests))}


def load_scenario(
    prompts: Sequence[Sequence[int]], *, requests: int, tokens: int, rows: int, seed: int = 0
) -> Scenario:
    """Return many requests of every kind, of which about as many wait as have rows."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(requests):
        options = {"max_tokens": rng.randint(1, tokens), "ignore_eos": True} | rng.choice(KINDS)
        end = None
        if rng.random() < CANCELLED:
            end = Cancellation(how="close", turns=rng.randrange(12))
        prompt = tuple(rng.choice(prompts))
        drawn.append(AuditRequest(prompt=prompt, options=options, cancellation=end))
    return Scenario(requests=tuple(drawn), segments=512, waiting=2 * rows)


# Grids by name, and the tokens of their answers by default.
GRIDS: dict[str, tuple[Callable[..., Grid], int]] = {
    "shipped": (shipped, 64),
    "families": (families, 420),
    "sampled": (sampled, 60),
}


def grid(name: str, words: Sequence[str]) -> int:
    """Run all scenarios of a grid and write the counts; return 1 if an answer differs."""
    draw, tokens = GRIDS[name]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.audit {name}")
    parser.add_argument("--tokens", type=int, default=tokens, help="of each answer")
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES], metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/soak_{name}.json"))
    options = parser.parse_args(words)
    started = time.perf_counter()
    cases: dict[str, Counts] = {}
    for setup, scenarios in draw(options.tokens):
        if options.only and setup.family not in options.only:
            continue
        audited = build(setup)
        for heading, scenario in scenarios.items():
            differences, counts = run_case(audited, scenario)
            counts["different"] = len(differences)
            cases[f"{setup}; {heading}".removesuffix("; ")] = counts
            for text in differences:
                print(f"DIFFERS: {setup}; {heading}: {text}")
        print(f"{setup}: {sum(x['tokens'] for x in cases.values())} tokens so far", flush=True)
        del audited
        jax.clear_caches()
        gc.collect()
    every = sum(cases.values(), collections.Counter())
    shown = ("answers", "tokens", "rounds", "different")
    figures = {
        "tokens": every["tokens"],
        "different_prompts": every["different"],
        "seconds": round(time.perf_counter() - started, 1),
        "cases": {case: {name: counts[name] for name in shown} for case, counts in cases.items()},
    }
    write_result(options.out, f"soak_{name}", figures)
    print(f"{every['tokens']} tokens compared, {every['different']} differences; see {options.out}")
    return 1 if every["different"] else 0


def load(words: Sequence[str]) -> int:
    """Run the load on a pair and write its counts; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit load")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--weights", default="auto", choices=typing.get_args(Weights))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    plan = {"rows": options.rows, "max_length": 320, "chunk": 16, "weights": options.weights}
    variants = ("sampled", "penalized")
    setup = Setup(family=GIVEN, plan=plan, variants=variants, prompt_logprobs=False, scripted=False)
    audited = build(setup, target=options.target, drafter=options.drafter)
    rng = random.Random(1)
    texts = heldout_chats(audited.engine.chat_ids, options.prompts)
    prompts = [ids[: rng.randrange(1, 260)] for ids in texts]
    scenario = load_scenario(
        prompts, requests=options.requests, tokens=options.tokens, rows=options.rows
    )
    memory: list[float] = []  # resident MB after the first half, and at the end

    def ended(count: int) -> None:
        if len(memory) < 2 * count // options.requests:
            gc.collect()
            memory.append(memory_mb(os.getpid())["resident"])
            print(f"{count} of {options.requests} requests have ended", file=sys.stderr)

    started = time.perf_counter()
    differences, counts = run_case(audited, scenario, ended)
    growth = memory[-1] / memory[0] - 1 if memory else 0.0
    figures = {
        "target": options.target,
        "drafter": options.drafter,
        "seconds": round(time.perf_counter() - started, 1),
        "memory_mb": memory,
        "growth": growth,
        "differences": differences,
        "counts": dict(sorted(counts.items())),
    }
    write_result(options.out, "soak_load", figures)
    print(json.dumps(figures, indent=1))
    return 1 if differences or counts["programs compiled"] or growth > GROWTH else 0
