"""How likely prompts are: what one whole pass of the target says, and nothing else changes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.compiler.keys import ProgramKey, Step
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.errors import RequestError
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_engine, tiny_drafter, tiny_hybrid

CHUNK = 16
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 41)


def prompt_of(length: int, seed: int = 0, vocab: int = 251) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()


@functools.cache
def target_of(engine: Engine) -> TargetModel:
    return TargetModel(engine.target, engine.params["target"], "float32")


def by_one_pass(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Log-probabilities [len(prompt) - 1, V] of what may follow each token."""
    ids = np.zeros((1, max(LENGTHS)), np.int32)  # what stands behind changes nothing before it
    ids[0, : len(prompt)] = prompt
    logits = np.asarray(target_of(engine).forward(ids).logits, np.float64)[0, : len(prompt) - 1]
    total = np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True))
    return logits - logits.max(axis=-1, keepdims=True) - total


def check(engine: Engine, prompt: list[int], result: Result, most: int) -> None:
    found = result.prompt_logprobs
    assert found is not None
    assert [x.token_id for x in found] == prompt
    assert (found[0].logprob, found[0].top) == (None, ())
    for place, (entry, row) in enumerate(zip(found[1:], by_one_pass(engine, prompt), strict=True)):
        assert entry.logprob == pytest.approx(row[prompt[place + 1]], abs=2e-4)
        values = [value for _, value in entry.top]
        np.testing.assert_allclose(values, np.sort(row)[::-1][:most], atol=2e-4)
        np.testing.assert_allclose(values, [row[i] for i, _ in entry.top], atol=2e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_of_a_prompt_is_as_likely_as_one_pass_says(
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
def test_asking_changes_no_token(tiny3: Engine, options: dict[str, Any]) -> None:
    prompts = [prompt_of(n, seed=1) for n in LENGTHS]
    plain = tiny3.generate_many(prompts, max_tokens=20, **options)
    asked = tiny3.generate_many(prompts, max_tokens=20, prompt_logprobs=0, **options)
    beside = [tiny3.submit(p, max_tokens=20, **options) for p in prompts[:2]]
    beside.append(tiny3.submit(prompts[-1], max_tokens=20, prompt_logprobs=1, **options))
    while not all(live.done for live in beside):
        tiny3.advance()
    said = [result.token_ids for result in plain]
    assert [result.token_ids for result in asked] == said
    assert [live.result().token_ids for live in beside] == [said[0], said[1], said[-1]]


def test_every_answer_for_a_prompt_is_told(tiny3: Engine) -> None:
    """Rows of one prompt share its prefill, but not what they are told of it."""
    prompt = prompt_of(41, seed=2)
    for result in tiny3.generate_many([prompt], n=3, max_tokens=3, prompt_logprobs=1):
        check(tiny3, prompt, result, 1)


def test_recurrent_targets_score_and_then_decode_as_ever() -> None:
    target = tiny_hybrid()
    plan = Plan(max_length=64, chunk=CHUNK, block=4, dtype="float32")
    engine = random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)
    for n in (1, CHUNK, 41):
        prompt = prompt_of(n, vocab=97)
        plain = engine.generate(prompt, max_tokens=10)
        scored = engine.generate(prompt, max_tokens=10, prompt_logprobs=2)
        assert scored.token_ids == plain.token_ids
        check(engine, prompt, scored, 2)


def test_a_kept_prefix_is_fed_again_to_be_scored(tiny: Engine) -> None:
    plan = dataclasses.replace(tiny.plan, prefix_cache=1 << 24)
    engine = Engine(tiny.target, tiny.drafter, tiny.params, plan)
    prompt = prompt_of(41)
    first = engine.generate(prompt, max_tokens=4)
    assert engine.generate(prompt, max_tokens=4).stats.cached_tokens > 0
    scored = engine.generate(prompt, max_tokens=4, prompt_logprobs=1)
    assert scored.stats.cached_tokens == 0
    assert scored.token_ids == first.token_ids
    check(engine, prompt, scored, 1)


def test_a_failed_step_is_made_good(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, runner = prompt_of(41), tiny.runner
    tiny.generate(prompt, max_tokens=4, prompt_logprobs=1)  # compiles what is to fail
    score, calls = tiny.executables[ProgramKey(Step.PROMPT_LOGPROBS)], []

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
def test_what_is_no_number_of_alternatives_is_refused(tiny: Engine, value: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs is .*; expected None, or how many"):
        tiny.check([1, 2], prompt_logprobs=value)


def test_results_as_json_tell_of_the_prompt_only_where_it_was_asked(tiny: Engine) -> None:
    assert "prompt_logprobs" not in tiny.generate([1, 2], max_tokens=2).to_json()
    told = tiny.generate([1, 2], max_tokens=2, prompt_logprobs=0).to_json()["prompt_logprobs"]
    assert [entry["token_id"] for entry in told] == [1, 2]
