"""Answers of concurrent engines, and resumption after a stop."""

import contextlib
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.errors import ConfigError
from dflash_jax.graph.keys import Variant
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.trainer import decoding, groups
from dflash_jax.trainer.loop import TrainingStopped
from dflash_jax.trainer.recipes import SMOKE, Bucket
from dflash_jax.trainer.regenerate import AnswerPrompt, answer, local_decoder
from dflash_jax.trainer.rows import Document
from dflash_jax.trainer.setup import open_target

BUCKETS = (Bucket(length=40, rows=2),)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    target = tiny_target(num_layers=1)
    return TargetModel(
        target, jax.device_put(random_params(build_pair(target, None))["target"]), "float32"
    )


@pytest.fixture(scope="module")
def prompts() -> list[AnswerPrompt]:
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 97, 5 + i % 25).astype(np.int32) for i in range(30)]
    return [AnswerPrompt(Document(ids, np.zeros(len(ids), bool)), 10) for ids in given]


def answers_of(
    path: Path, model: TargetModel, prompts: list[AnswerPrompt], **options: object
) -> list:
    found = answer(
        path, local_decoder(model), prompts, BUCKETS, report=lambda line: None, **options
    )
    return [document.ids.tolist() for document in found]


@pytest.mark.sample("greedy-int8-auto")
@pytest.mark.parametrize(
    ("variant", "weights", "caches"),
    [
        (Variant.GREEDY, "int8", "auto"),
        (Variant.SAMPLED, "int8", "int8"),
        pytest.param(Variant.SAMPLED, "float", "auto", marks=pytest.mark.soak),
    ],
)
def test_caches_are_rounded_where_matrices_are_and_requests_sample(
    model: TargetModel, variant: Variant, weights: Any, caches: str
) -> None:
    pool = decoding.EnginePool(model, variant, weights=weights)
    with pool.engine(BUCKETS[0]) as engine:
        assert engine.plan.kv_dtype == caches


@pytest.mark.exhaustive
def test_concurrent_engines_give_the_answers_of_one(
    tmp_path: Path, model: TargetModel, prompts: list[AnswerPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, names, before = [], [], set(threading.enumerate())
    for cores in (1, 3):
        monkeypatch.setattr(decoding, "cores", lambda cores=cores: cores)
        engines = decoding.EnginePool(model, Variant.GREEDY)
        assert engines.count(BUCKETS[0]) == cores
        with engines.engine(BUCKETS[0]) as first:
            if cores > 1:
                with engines.engine(BUCKETS[0]) as second:
                    assert first is not second
                    assert (
                        first.core.runner.executables is second.core.runner.executables
                    )  # compiled once
        path = tmp_path / str(cores)
        texts.append(answers_of(path, model, prompts))
        names.append(path.read_text())
    assert texts[0] == texts[1]
    assert names[0] == names[1]
    assert set(threading.enumerate()) <= before


@pytest.mark.exhaustive
def test_answers_resume_after_a_stop(
    tmp_path: Path, model: TargetModel, prompts: list[AnswerPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answers_of(tmp_path / "whole", model, prompts)
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    assert len(lines) > 3

    with monkeypatch.context() as patch:
        signalled = contextlib.nullcontext(SimpleNamespace(raised=True))
        patch.setattr(groups, "stop_flag", lambda: signalled)
        with pytest.raises(TrainingStopped, match=f"group 1 of {len(lines)}"):
            answers_of(tmp_path / "cut", model, prompts)
        (tmp_path / "last").write_text("".join(lines[:-1]))
        with pytest.raises(TrainingStopped, match=f"group {len(lines)} of {len(lines)}"):
            answers_of(tmp_path / "last", model, prompts)  # and the next group does not start
    assert (tmp_path / "cut").read_text() == lines[0]
    assert (tmp_path / "last").read_text() == "".join(lines)
    with (tmp_path / "cut").open("a") as file:
        file.write(lines[1][:7])  # an incomplete line of a killed process
    assert answers_of(tmp_path / "cut", model, prompts) == whole
    assert (tmp_path / "cut").read_text() == "".join(lines)


def test_prompts_without_room_for_an_answer_are_refused(
    tmp_path: Path, model: TargetModel, prompts: list[AnswerPrompt]
) -> None:
    with pytest.raises(ConfigError, match="none of 30 prompts fits: the longest bucket holds 8"):
        answer(
            tmp_path / "x", local_decoder(model), prompts, [Bucket(length=8, rows=1)], report=print
        )


def test_skipped_prompts_are_counted_before_any_is_answered(
    tmp_path: Path, model: TargetModel, prompts: list[AnswerPrompt]
) -> None:
    def raise_stop(line: str) -> None:
        raise InterruptedError(line)

    with pytest.raises(InterruptedError, match=r"26 of 30 prompts skipped: .* 16 tokens"):
        answer(
            tmp_path / "x",
            local_decoder(model),
            prompts,
            [Bucket(length=16, rows=4)],
            report=raise_stop,
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.soak)])
def test_answers_of_a_rounded_target_are_those_an_engine_serves(
    tmp_path: Path, weights: str
) -> None:
    recipe = dataclasses.replace(SMOKE, target_weights=weights)
    rounded = open_target("tiny", recipe)
    questions = ["Add two numbers.", "What is a prime?", "Why is the sky blue?"]
    ids = [rounded.tokenizer.encode(text) for text in questions]
    asked = [AnswerPrompt(Document(np.array(x), np.zeros(len(x), bool)), 12) for x in ids]
    decoder = local_decoder(rounded, weights=recipe.target_weights)
    found = answer(tmp_path / "answers", decoder, asked, BUCKETS, report=lambda line: None)

    engine = dj.load("tiny", drafter=None, plan=dj.Plan(weights=weights, max_length=64))
    served = [[*x, *engine.generate(x, max_tokens=12).token_ids] for x in ids]
    assert sorted(document.ids.tolist() for document in found) == sorted(served)
