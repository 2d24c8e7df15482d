"""Penalties, biases, log-probabilities and `n` answers, compared with their definitions."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.engine import request as requests
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.errors import RequestError
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import force_acceptance, set_script

PROMPT = [5, 4, 3, 2, 1, 5, 5]
PENALTIES = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.4},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"logit_bias": {7: 4.0, "9": 3.5, 2: -100}, "presence_penalty": 1.0},
]


def process_by_hand(logits: np.ndarray, output: list[int], options: dict[str, Any]) -> np.ndarray:
    """Return one row of logits after PROMPT and `output`, processed by the definition."""
    x = logits.astype(np.float32).copy()
    for token, value in options.get("logit_bias", {}).items():
        x[int(token)] += value
    for token in {*PROMPT, *output}:
        r = options.get("repetition_penalty", 1.0)
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= options.get("frequency_penalty", 0.0) * output.count(token)
        x[token] -= options.get("presence_penalty", 0.0)
    return x


@pytest.fixture(scope="module")
def model(tiny: Engine) -> TargetModel:
    return TargetModel(tiny.graph.config, tiny.params["target"], "float32")


def logits_after(model: TargetModel, output: list[int]) -> np.ndarray:
    """Return logits at every output token, from one forward pass."""
    ids = np.zeros((1, 64), np.int32)
    whole = [*PROMPT, *output]
    ids[0, : len(whole)] = whole
    return np.asarray(model.forward(ids).logits)[0, len(PROMPT) - 1 : len(whole)]


@pytest.mark.parametrize("options", PENALTIES)
def test_greedy_output_with_penalties_follows_its_definition_in_both_modes(
    tiny: Engine, model: TargetModel, options: dict[str, Any]
) -> None:
    plain = tiny.generate(PROMPT, max_tokens=40, speculative=False, **options).token_ids
    assert tiny.generate(PROMPT, max_tokens=40, **options).token_ids == plain
    rows = logits_after(model, plain)
    for i, token in enumerate(plain):
        processed = process_by_hand(rows[i], plain[:i], options)
        assert processed[token] >= processed.max() - 1e-4, i
    assert plain != tiny.generate(PROMPT, max_tokens=40).token_ids


@pytest.mark.parametrize("pattern", [[3], [2, 0, 3, 1]])
def test_penalties_count_the_drafts_of_their_own_block(
    scripted: Engine, tiny: Engine, pattern: list[int]
) -> None:
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.6}
    truth = tiny.generate(PROMPT, max_tokens=40, speculative=False, **options).token_ids
    set_script(scripted, force_acceptance([*PROMPT, *truth], len(PROMPT), pattern, 251))
    result = scripted.generate(PROMPT, max_tokens=40, **options)
    assert result.token_ids == truth
    assert result.stats.acceptance_lengths[:4] == [n + 1 for n in (pattern * 4)[:4]]


@pytest.mark.parametrize("forced", [(), (200, 201, 200, 203, 204, 205)], ids=["min_tokens", "call"])
def test_penalties_count_tokens_that_recovery_forces_or_replaces(
    tiny: Engine,
    model: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
    forced: tuple[int, ...],
) -> None:
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    free = tiny.generate(PROMPT, max_tokens=12, **penalties).token_ids
    end = free[6]
    at = free.index(end)
    vocabulary = OutputVocabulary(text=lambda ids: ":", calls=(forced,) if forced else ())
    monkeypatch.setattr(requests, "vocabulary_of", lambda *_: vocabulary)
    settings = dataclasses.replace(OFF, floor=40, tool_prefix=True, min_tokens=40)
    options = penalties | {"max_tokens": 40, "stop_token_ids": [end], "recovery": settings}
    plain = tiny.generate(PROMPT, speculative=False, logprobs=0, **options)
    fast = tiny.generate(PROMPT, logprobs=0, **options)
    assert fast.token_ids == plain.token_ids
    known = [[token.logprob for token in result.logprobs or ()] for result in (fast, plain)]
    assert known[0] == pytest.approx(known[1], abs=1e-5)  # bits are for optimised programs
    assert plain.token_ids[at : at + len(forced)] == list(forced)
    assert plain.stats.recovery["tool_prefix"] == bool(forced)
    rows = logits_after(model, plain.token_ids)
    for i, token in enumerate(plain.logprobs or ()):
        if at <= i < at + max(len(forced), 1):
            assert token.logprob is None, i  # forced, or not the model's own choice
        if not at <= i < at + len(forced):
            processed = process_by_hand(rows[i], plain.token_ids[:i], penalties)
            processed[end] = -np.inf
            assert processed[token.token_id] >= processed.max() - 1e-4, i


def test_penalties_do_not_leak_between_rows_or_requests(tiny3: Engine) -> None:
    alone = tiny3.generate(PROMPT, max_tokens=25).token_ids
    sampled = tiny3.generate(PROMPT, max_tokens=25, temperature=1.0, seed=5).token_ids
    processed = tiny3.generate(PROMPT, max_tokens=25, **PENALTIES[2]).token_ids
    handles = [
        tiny3.submit(PROMPT, max_tokens=25, **PENALTIES[2]),
        tiny3.submit(PROMPT, max_tokens=25),
        tiny3.submit(PROMPT, max_tokens=25, temperature=1.0, seed=5),
        tiny3.submit(PROMPT, max_tokens=25, **PENALTIES[3]),  # takes over a row
        tiny3.submit(PROMPT, max_tokens=25),
    ]
    while not all(handle.done for handle in handles):
        tiny3.advance()
    assert [handle.token_ids for handle in (handles[1], handles[4])] == [alone, alone]
    assert handles[2].token_ids == sampled
    assert handles[0].token_ids == processed


@pytest.mark.parametrize("speculative", [True, False])
def test_log_probabilities_are_the_targets_own(
    tiny: Engine, model: TargetModel, speculative: bool
) -> None:
    options = {"speculative": speculative, "frequency_penalty": 1.0}
    stream = tiny.submit(PROMPT, max_tokens=20, logprobs=3, **options)
    given = [x for piece in stream for x in piece.logprobs]
    result = stream.result()
    assert given == result.logprobs
    assert [x.token_id for x in given] == result.token_ids
    rows = np.asarray(jax.nn.log_softmax(logits_after(model, result.token_ids)))
    for row, x in zip(rows, given, strict=False):
        np.testing.assert_allclose(x.logprob, row[x.token_id], atol=1e-4)
        np.testing.assert_allclose([p for _, p in x.top], np.sort(row)[::-1][:3], atol=1e-4)
        assert x.top[0][0] == row.argmax()
    assert tiny.generate(PROMPT, max_tokens=3).logprobs is None
    none = tiny.generate(PROMPT, max_tokens=3, logprobs=0).logprobs
    assert none
    assert [x.top for x in none] == [(), (), ()]


def test_log_probabilities_alone_change_no_token(tiny: Engine) -> None:
    plain = tiny.generate(PROMPT, max_tokens=40)
    assert tiny.generate(PROMPT, max_tokens=40, logprobs=5).token_ids == plain.token_ids


def test_several_answers_share_one_prefill(tiny3: Engine) -> None:
    """Only the last chunk, which decides the first token, is fed for each of them."""
    prompt = list(range(40))
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 7}
    tiny3.generate(prompt, **options)  # compiles the variant
    calls = []
    key = tiny3.graph.key(Step.PREFILL, Variant.SAMPLED)
    run = tiny3.core.runner.executables[key]
    tiny3.core.runner.executables[key] = lambda *a: (calls.append(1), run(*a))[1]  # type: ignore[assignment]
    try:
        results = tiny3.generate_many([prompt], n=3, **options)
    finally:
        tiny3.core.runner.executables[key] = run
    assert len(calls) == 2 + 3  # chunks of 16
    assert len({tuple(r.token_ids) for r in results}) == 3
    for i, result in enumerate(results):  # answer i is the output of seed + i
        alone = tiny3.generate(prompt, **options | {"seed": 7 + i})
        assert alone.token_ids == result.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; expected a number from 0"),
        ({"min_p": True}, "min_p is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number from 1e-06"),
        (
            {"repetition_penalty": 1e-40},
            "repetition_penalty is 1e-40; expected a number from 1e-06",
        ),
        ({"repetition_penalty": 1e300}, "expected a number from 1e-06 to 1000000"),
        ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1; expected a number from -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan; expected"),
        ({"logit_bias": {3: 101}}, r"logit_bias is \{3: 101\}; expected token ids with numbers"),
        ({"logit_bias": {999: 1}}, r"logit_bias names \[999\]; the target knows 0 to 250"),
        ({"logit_bias": {"a": 1}}, "expected a mapping of token ids to numbers"),
        ({"logit_bias": 3}, "expected a mapping of token ids"),
        ({"logprobs": 21}, "logprobs is 21; expected None, or how many"),
        ({"logprobs": True}, "logprobs is True; expected None"),
    ],
)
def test_bad_settings_are_refused_by_name(
    tiny: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.generate(PROMPT, max_tokens=4, **options)
    with pytest.raises(RequestError, match="n is 0; expected an integer of at least 1"):
        tiny.generate_many([PROMPT], n=0)
