"""Random recovery settings, modes and batches: each answer equals that of the request alone."""

import dataclasses
import random
from typing import Any

import pytest

from dflash_jax.engine import request as requests
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.testing import random_engine
from dflash_jax.tool_parsers import SYNTAXES

VOCAB = 251


@pytest.fixture(scope="module")
def engine(tiny3: Engine) -> Engine:
    """Three rows with a prefix cache."""
    made = random_engine(
        tiny3.graph.config,
        tiny3.graph.drafter_config,
        dataclasses.replace(tiny3.plan, prefix_cache=1 << 20),
    )
    made.core.runner.compiled.executables = (
        tiny3.core.runner.executables
    )  # the prefix programs are added
    return made


def random_vocabulary(rng: random.Random) -> OutputVocabulary:
    """Return random meanings of tokens: colons, marks of thoughts, hidden tokens."""
    marks = {rng.randrange(VOCAB): m for m in [":"] * 60 + ["<think>"] * 9 + ["</think>"] * 9}
    return OutputVocabulary(
        text=lambda ids: "".join(marks.get(i, "w") for i in ids),
        syntax=SYNTAXES["qwen_xml"],
        hidden=frozenset(rng.sample(range(VOCAB), rng.choice([0, 100, 251]))),
        calls=names(rng),
        close=tuple(rng.sample(range(VOCAB), rng.choice([1, 2, 7]))),
    )


def names(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Return the calls of up to four tools, whose names differ at random places."""
    found: list[tuple[int, ...]] = []
    for _ in range(rng.choice([0, 1, 2, 4])):
        begun = rng.choice(found)[: rng.randint(1, 6)] if found else ()
        found.append((*begun, *rng.sample(range(VOCAB), rng.choice([1, 2, 6]))))
    return tuple(found)


def settings(rng: random.Random) -> Recovery:
    return dataclasses.replace(
        OFF,
        floor=rng.choice([0, 4, 40]),
        tool_prefix=rng.random() < 0.6,
        empty_retry=rng.random() < 0.6,
        repeat_limit=rng.choice([0, 2, 3]),
        loops=rng.random() < 0.6,
        loop_tokens=rng.choice([2, 5, 20]),
        repeated_calls=rng.choice([0, 2]),
        min_tokens=rng.choice([0, 0, 9]),
        answer_reserve=rng.choice([0, 10, 60]),
    )


def random_request(rng: random.Random, engine: Engine) -> dict[str, Any]:
    """Return a request whose prompt may share a prefix, and whose end tokens are likely ones."""
    shared = [rng.randrange(3)] * rng.choice([0, 16, 33])
    prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
    free = engine.generate(prompt, max_tokens=8).token_ids
    options: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 50),
        "stop_token_ids": sorted({*rng.sample(free, 2), *rng.sample(range(VOCAB), 5)}),
        "recovery": settings(rng),
        "speculative": rng.random() < 0.7,
    }
    if rng.random() < 0.4:
        options |= {"temperature": 0.9, "seed": rng.randrange(99)}
    if rng.random() < 0.3:
        options |= {"frequency_penalty": 0.7, "logprobs": 2}
    return options


def check_batched_against_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> set[str]:
    """Compare batched answers with those of single requests; return the recovery events."""
    events: set[str] = set()
    for seed in seeds:
        rng = random.Random(seed)
        vocabulary = random_vocabulary(rng)
        monkeypatch.setattr(requests, "vocabulary_of", lambda *_, vocabulary=vocabulary: vocabulary)
        batch = [random_request(rng, engine) for _ in range(5)]
        handles = []
        for options in batch:
            handles.append(engine.submit(**options))
            for _ in range(rng.randint(0, 4)):
                engine.advance()
        while engine.core.busy:
            engine.advance()
        assert engine.core.prefix_cache
        engine.core.prefix_cache.clear()
        for handle, options in zip(handles, batch, strict=True):
            alone = engine.generate(**options)
            got = handle.result()
            assert got.token_ids == alone.token_ids == list(handle.sequence.state.ids), options
            assert got.finish_reason == alone.finish_reason
            assert got.stats.recovery == alone.stats.recovery
            assert [x.token_id for x in got.logprobs or ()] == (
                got.token_ids if "logprobs" in options else []
            )
            other = engine.generate(**options | {"speculative": not options["speculative"]})
            assert other.token_ids == alone.token_ids, options
            assert other.stats.recovery == alone.stats.recovery, options
            events |= set(got.stats.recovery) | set(got.stats.fallbacks)
    return events


@pytest.mark.exhaustive
def test_recovered_answers_do_not_depend_on_batch_or_mode(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = check_batched_against_alone(engine, monkeypatch, range(8, 20))
    assert events >= {"floor", "empty_retry", "thought_closed_by_force"}


@pytest.mark.soak
def test_many_recovered_answers_do_not_depend_on_batch_or_mode(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = check_batched_against_alone(engine, monkeypatch, range(100, 200))
    assert events >= {"floor", "tool_prefix", "empty_retry", "repeat", "thought_closed_by_force"}
