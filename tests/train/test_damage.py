"""Damaged files of a run: errors name what to remove, without a traceback."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.cli.train import draw
from dflash_jax.errors import CheckpointError
from dflash_jax.train import features, regenerate, rows, run
from dflash_jax.train.recipes import SMOKE


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_damaged_rows_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rows\.npz is damaged .*; remove it, and"):
        rows.load(tmp_path / "rows.npz")


@pytest.mark.parametrize("lines", ["3", "[[1]", '{"a": 1}', "[[1], [2]]\n[[3]]", "[[1]]\n" * 4])
def test_answers_that_are_not_those_asked_for_are_named(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(lines + "\n")
    with pytest.raises(CheckpointError, match=r"answers\.jsonl is damaged .*; remove it, and"):
        regenerate.stored(path, [2, 2, 1])


def test_answers_of_the_right_sizes_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("[[1], [2]]\n[[], [4, 5]]\n[[")
    assert regenerate.stored(path, [2, 2, 1]) == [[[1], [2]], [[], [4, 5]]]


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_damaged_results_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"results\.json is damaged"):
        run.measured(tmp_path, "tiny", [], SMOKE, print)


@pytest.mark.parametrize("lost", ["about.json", "0.best.npy"])
@pytest.mark.parametrize("how", [Path.unlink, lambda path: path.write_bytes(b"{")])
def test_a_damaged_feature_cache_is_named(tmp_path: Path, lost: str, how) -> None:
    about = {"dtype": "float16", "buckets": 1, "names": ["best"]}
    (tmp_path / "about.json").write_text(json.dumps(about))
    np.save(tmp_path / "0.best.npy", np.zeros((2, 3), np.int32))
    features.FeatureCache(tmp_path)
    how(tmp_path / lost)
    with pytest.raises(CheckpointError, match=r"is damaged .*; remove it, and"):
        features.FeatureCache(tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no room")
def test_a_feature_cache_has_its_room_before_it_is_filled(tmp_path: Path) -> None:
    """Otherwise a full disk ends the process by SIGBUS, without a message."""
    array = features._mapped(tmp_path / "x.npy", np.dtype(np.uint16), (64, 1 << 10))
    assert (tmp_path / "x.npy").stat().st_blocks * 512 >= array.nbytes


@pytest.mark.parametrize("log", [None, "", "{"])
def test_a_run_without_its_log_is_whole_but_not_drawn(tmp_path: Path, log, capsys) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    assert draw(tmp_path) is None
    assert "no curves were drawn" in capsys.readouterr().err
