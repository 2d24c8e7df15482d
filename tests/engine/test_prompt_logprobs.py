"""Log-probabilities of prompts equal those of one forward pass, and change no output."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.errors import RequestError
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_engine, tiny_drafter, tiny_hybrid

CHUNK = 16
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 41)


def prompt_of(length: int, seed: int = 0, vocab: int = 251) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()


@functools.cache
def target_of(engine: Engine) -> TargetModel:
    return TargetModel(engine.graph.config, engine.params["target"], "float32")


def by_one_forward_pass(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Return log-probabilities [len(prompt) - 1, V] of the next token."""
    ids = np.zeros((1, max(LENGTHS)), np.int32)  # padding does not affect earlier positions
    ids[0, : len(prompt)] = prompt
    logits = np.asarray(target_of(engine).forward(ids).logits, np.float64)[0, : len(prompt) - 1]
    total = np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True))
    return logits - logits.max(axis=-1, keepdims=True) - total


def check(engine: Engine, prompt: list[int], result: Result, most: int) -> None:
    logprobs = result.prompt_logprobs
    assert logprobs is not None
    assert [x.token_id for x in logprobs] == prompt
    assert (logprobs[0].logprob, logprobs[0].top) == (None, ())
    for place, (entry, row) in enumerate(
        zip(logprobs[1:], by_one_forward_pass(engine, prompt), strict=True)
    ):
        assert entry.logprob == pytest.approx(row[prompt[place + 1]], abs=2e-4)
        values = [value for _, value in entry.top]
        np.testing.assert_allclose(values, np.sort(row)[::-1][:most], atol=2e-4)
        np.testing.assert_allclose(values, [row[i] for i, _ in entry.top], atol=2e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_prompt_logprobs_equal_those_of_one_forward_pass(
    rows: int, tiny: Engine, tiny3: Engine
) -> None:
    engine = {1: tiny, 3: tiny3}[rows]
    prompts = [prompt_of(n) for n in LENGTHS]
    for most in (0, 3):
        results = engine.generate_many(prompts, max_tokens=4, prompt_logprobs=most)
        for prompt, result in zip(prompts, results, strict=True):
            check(engine, prompt, result, most)
            assert result.logprobs is None


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative": False}, {"temperature": 0.9, "seed": 3}, {"logprobs": 1}],
    ids=str,
)
def test_prompt_logprobs_change_no_token(tiny3: Engine, options: dict[str, Any]) -> None:
    prompts = [prompt_of(n, seed=1) for n in LENGTHS]
    plain = tiny3.generate_many(prompts, max_tokens=20, **options)
    with_logprobs = tiny3.generate_many(prompts, max_tokens=20, prompt_logprobs=0, **options)
    handles = [tiny3.submit(p, max_tokens=20, **options) for p in prompts[:2]]
    handles.append(tiny3.submit(prompts[-1], max_tokens=20, prompt_logprobs=1, **options))
    while not all(handle.done for handle in handles):
        tiny3.advance()
    tokens = [result.token_ids for result in plain]
    assert [result.token_ids for result in with_logprobs] == tokens
    assert [handle.result().token_ids for handle in handles] == [tokens[0], tokens[1], tokens[-1]]


def test_every_answer_has_the_logprobs_of_its_prompt(tiny3: Engine) -> None:
    """Rows of one prompt share its prefill, but each result has the log-probabilities."""
    prompt = prompt_of(41, seed=2)
    for result in tiny3.generate_many([prompt], n=3, max_tokens=3, prompt_logprobs=1):
        check(tiny3, prompt, result, 1)


@pytest.mark.exhaustive
def test_recurrent_targets_compute_prompt_logprobs() -> None:
    target = tiny_hybrid()
    plan = Plan(max_length=64, chunk=CHUNK, block=4, dtype="float32")
    engine = random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)
    for n in (1, CHUNK, 41):
        prompt = prompt_of(n, vocab=97)
        plain = engine.generate(prompt, max_tokens=10)
        result = engine.generate(prompt, max_tokens=10, prompt_logprobs=2)
        assert result.token_ids == plain.token_ids
        check(engine, prompt, result, 2)


@pytest.mark.exhaustive
def test_a_cached_prefix_is_fed_again_for_its_logprobs(tiny: Engine) -> None:
    plan = dataclasses.replace(tiny.plan, prefix_cache=1 << 24)
    engine = Engine(Graph(tiny.graph.pair, plan), tiny.params)
    prompt = prompt_of(41)
    first = engine.generate(prompt, max_tokens=4)
    assert engine.generate(prompt, max_tokens=4).stats.cached_tokens > 0
    result = engine.generate(prompt, max_tokens=4, prompt_logprobs=1)
    assert result.stats.cached_tokens == 0
    assert result.token_ids == first.token_ids
    check(engine, prompt, result, 1)


def test_prompt_logprobs_survive_a_failed_step(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, runner = prompt_of(41), tiny.core.runner
    tiny.generate(prompt, max_tokens=4, prompt_logprobs=1)  # compiles what is to fail
    score, calls = tiny.core.runner.executables[ProgramKey(Step.PROMPT_LOGPROBS)], []

    def failing(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("the device is gone")
        return score(*arguments)

    monkeypatch.setitem(runner.executables, ProgramKey(Step.PROMPT_LOGPROBS), failing)
    result = tiny.generate(prompt, max_tokens=4, prompt_logprobs=1)
    assert len(calls) == 5
    assert result.stats.recovery["rebuilt"] == 1
    check(tiny, prompt, result, 1)


@pytest.mark.parametrize("value", [-1, 21, True, "1"])
def test_invalid_numbers_of_alternatives_are_refused(tiny: Engine, value: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs is .*; expected None, or how many"):
        tiny.check([1, 2], prompt_logprobs=value)


def test_json_results_have_prompt_logprobs_only_where_requested(tiny: Engine) -> None:
    assert "prompt_logprobs" not in tiny.generate([1, 2], max_tokens=2).to_json()
    entries = tiny.generate([1, 2], max_tokens=2, prompt_logprobs=0).to_json()["prompt_logprobs"]
    assert [entry["token_id"] for entry in entries] == [1, 2]
