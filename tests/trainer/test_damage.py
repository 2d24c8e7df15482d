"""Damaged files of a run: errors name what to remove, without a traceback."""

import dataclasses
import shutil
import types
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dflash_jax.cli import main
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.trainer import groups, rows, run
from dflash_jax.trainer.feature_store import FeatureOrigin, FeatureStore, digest
from dflash_jax.trainer.files import unless_refused
from dflash_jax.trainer.loop import read_log
from dflash_jax.trainer.picture import picture
from dflash_jax.trainer.recipes import SMOKE


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
        groups.stored(path, [2, 2, 1])


def test_answers_of_the_right_sizes_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("[[1], [2]]\n[[], [4, 5]]\n[[")
    assert groups.stored(path, [2, 2, 1]) == [[[1], [2]], [[], [4, 5]]]


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_damaged_results_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"results\.json is damaged"):
        run.measured(tmp_path, "tiny", [], SMOKE, print)


ORIGIN = FeatureOrigin(
    target="t", weights="float", taps=(1, 2), final=False, width=4, dtype="float32"
)
ROW = np.arange(3, dtype=np.int32)


def filled_store(folder: Path) -> FeatureStore:
    store = FeatureStore(folder, ORIGIN)
    store.add("x", [ROW], store.bits(np.ones((3, 2, 4), np.float32)), ROW)
    return store


@pytest.mark.parametrize("lost", ["about.json", "*.npy", "*.npz"])
def test_a_damaged_file_of_features_is_named(tmp_path: Path, lost: str) -> None:
    [path] = filled_store(tmp_path / "f").open().folder.glob(lost)
    path.write_bytes(b"{")
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged .*; remove it, and"):
        FeatureStore(tmp_path / "f", ORIGIN).open()


def test_features_of_which_a_bit_has_changed_are_refused_by_name(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "f")
    [path] = store.folder.glob("*.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged .*checksum.*; remove it"):
        store.open().read([digest(ROW)], 5)
    path.unlink()
    assert digest(ROW) not in store.open()  # and is made again


@pytest.mark.parametrize(
    "change",
    [
        {"target": "u"},
        {"weights": "int8"},
        {"taps": (1, 3)},
        {"dtype": "bfloat16"},
        {"final": True},
    ],
)
def test_features_of_another_origin_are_not_found(tmp_path: Path, change: dict) -> None:
    filled_store(tmp_path / "f")
    other = FeatureStore(tmp_path / "f", dataclasses.replace(ORIGIN, **change))
    assert digest(ROW) not in other.open()
    assert digest(ROW) in FeatureStore(tmp_path / "f", ORIGIN).open()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_features_have_every_bit_of_their_dtype(tmp_path: Path, dtype: str) -> None:
    store = FeatureStore(tmp_path, dataclasses.replace(ORIGIN, dtype=dtype))
    values = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(store.dtype)
    store.add("x", [ROW], store.bits(values), ROW)
    found, best = store.open().read([digest(ROW)], 5)
    assert found.dtype == store.dtype
    np.testing.assert_array_equal(found[0, :3], values)
    np.testing.assert_array_equal(found[0, 3:], 0)
    assert best.tolist() == [[0, 1, 2, 0, 0]]


def test_a_full_disk_is_named_and_leaves_complete_parts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(free=9)

    store = filled_store(tmp_path / "f")
    before = sorted(store.folder.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(CheckpointError, match=r"0.0 MB free; free some .* needs 36 bytes, and"):
        store.add("y", [np.arange(1)], np.zeros((1, 2, 4), np.uint32), np.zeros(1))
    assert sorted(store.folder.iterdir()) == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(CheckpointError, match=r"features could not be kept in .*f/.*; every token"):
        FeatureStore(tmp_path / "f", ORIGIN)


@pytest.mark.parametrize("log", [None, "", "{", '{"step": 1, "loss": 2.0}\n[]\n{"step": 2}'])
def test_a_damaged_log_costs_its_curves_alone(tmp_path: Path, log: str | None) -> None:
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == ([1, 2] if log and "step" in log else [])
    ElementTree.fromstring(picture(lines, 9))


REFUSED = ["--set", "answers=given", "--set", "held_out=0", "--preset", "smoke", "--data"]


def test_refused_data_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines can be read, so the folder is made, but no row has anything to learn."""
    (data := tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    (empty := tmp_path / "empty").mkdir()
    for out in (tmp_path / "runs" / "one", empty):
        assert main(["train", "--out", str(out), *REFUSED, str(data)]) == 1
        assert "ConfigError: no block can start in any of the 0 rows" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data.jsonl", "empty"]


@pytest.mark.parametrize("name", ["run.json", "answers.jsonl"])
def test_a_refusal_removes_neither_an_earlier_run_nor_answers(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    if name == "run.json":
        out.mkdir()
        (out / name).touch()

    def refused() -> None:
        with unless_refused(out, "run.json"):
            out.mkdir(exist_ok=True)
            (out / "run.json").touch()
            (out / name).touch()
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        refused()
    assert (out / name).exists()
