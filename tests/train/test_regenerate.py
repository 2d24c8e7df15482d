"""Answers written by several engines at a time, and gone on with after a stop."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflash_jax.compiler.keys import Variant
from dflash_jax.errors import ConfigError
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.train import regenerate, threads
from dflash_jax.train.loop import Stopped
from dflash_jax.train.recipe import Bucket
from dflash_jax.train.regenerate import Prompt, answer
from dflash_jax.train.rows import Document

BUCKETS = (Bucket(length=40, rows=2),)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    target = tiny_target(num_layers=1)
    return TargetModel(target, jax.device_put(random_params(target, None)["target"]), "float32")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 97, 5 + i % 25).astype(np.int32) for i in range(30)]
    return [Prompt(Document(ids, np.zeros(len(ids), bool)), 10) for ids in given]


def said(path: Path, model: TargetModel, prompts: list[Prompt], **options: object) -> list:
    found = answer(path, model, prompts, BUCKETS, tell=lambda line: None, **options)
    return [document.ids.tolist() for document in found]


def test_several_writers_write_what_one_writes(
    tmp_path: Path, model: TargetModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, names, before = [], [], set(threading.enumerate())
    for cores in (1, 3):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        writers = regenerate.Writers(model, Variant.GREEDY)
        assert writers.count(BUCKETS[0]) == cores
        with writers.engine(BUCKETS[0]) as first:
            if cores > 1:
                with writers.engine(BUCKETS[0]) as second:
                    assert first is not second
                    assert first.executables is second.executables  # compiled once
        path = tmp_path / str(cores)
        texts.append(said(path, model, prompts))
        names.append(path.read_text())
    assert texts[0] == texts[1]
    assert names[0] == names[1]
    assert set(threading.enumerate()) <= before


def test_answers_go_on_where_they_were_stopped(
    tmp_path: Path, model: TargetModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = said(tmp_path / "whole", model, prompts)
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    assert len(lines) > 3

    with monkeypatch.context() as patch:
        signalled = contextlib.nullcontext(SimpleNamespace(raised=True))
        patch.setattr(regenerate, "stop_flag", lambda: signalled)
        with pytest.raises(Stopped, match=f"group 1 of {len(lines)}"):
            said(tmp_path / "cut", model, prompts)
        (tmp_path / "last").write_text("".join(lines[:-1]))
        with pytest.raises(Stopped, match=f"group {len(lines)} of {len(lines)}"):
            said(tmp_path / "last", model, prompts)  # and what follows does not begin
    assert (tmp_path / "cut").read_text() == lines[0]
    assert (tmp_path / "last").read_text() == "".join(lines)
    with (tmp_path / "cut").open("a") as file:
        file.write(lines[1][:7])  # a killed process leaves half a line
    assert said(tmp_path / "cut", model, prompts) == whole
    assert (tmp_path / "cut").read_text() == "".join(lines)


def test_prompts_without_room_for_an_answer_are_refused(
    tmp_path: Path, model: TargetModel, prompts: list[Prompt]
) -> None:
    with pytest.raises(ConfigError, match="none of 30 prompts fits: the longest bucket holds 8"):
        answer(tmp_path / "x", model, prompts, [Bucket(length=8, rows=1)], tell=print)


def test_prompts_left_out_are_counted_before_any_is_answered(
    tmp_path: Path, model: TargetModel, prompts: list[Prompt]
) -> None:
    def hear(line: str) -> None:
        raise InterruptedError(line)

    with pytest.raises(InterruptedError, match=r"26 of 30 prompts left out: .* 16 tokens"):
        answer(tmp_path / "x", model, prompts, [Bucket(length=16, rows=4)], tell=hear)
