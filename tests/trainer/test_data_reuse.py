"""Data of one run reused for another drafter."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.trainer import setup
from dflash_jax.trainer.recipes import SMOKE, Bucket


def about(**changes: Any) -> dict[str, Any]:
    recipe = dataclasses.asdict(dataclasses.replace(SMOKE, **changes))
    return {"target": "t", "data": "d", "self_written": 3, "mask_id": 1, "recipe": recipe}


def finished(folder: Path) -> Path:
    (folder / "features/origin").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about()))
    for name in "rows.npz", "turns.jsonl", "features/origin/x.npy", "features/origin/.x.partial":
        (folder / name).write_text(name)
    return folder


def test_answers_are_taken_and_features_if_they_are_kept(tmp_path: Path) -> None:
    source = finished(tmp_path / "first")
    deeper = about(layers=3, draft_vocab=9, block=6, buckets=(Bucket(length=256, rows=9),))
    setup.check_reuse(source, deeper)
    for _ in range(2):  # a resumed run takes them again
        setup.reuse_data(source, tmp_path / "deeper", with_features=True)
    found = sorted(p.name for p in (tmp_path / "deeper").rglob("*") if p.is_file())
    assert found == ["rows.npz", "turns.jsonl", "x.npy"]
    linked = (tmp_path / "deeper/features/origin/x.npy").stat()
    assert linked.st_nlink == 2  # no disk is used twice
    setup.reuse_data(source, tmp_path / "online", with_features=False)
    assert sorted(p.name for p in (tmp_path / "online").iterdir()) == ["rows.npz", "turns.jsonl"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = finished(tmp_path / "first")
    monkeypatch.setattr(shutil, "copyfile", no_room)
    with pytest.raises(CheckpointError, match=r"second could not be written .*No space left"):
        setup.reuse_data(source, tmp_path / "second", with_features=True)
    assert not [*(tmp_path / "second").iterdir()]


def test_data_of_other_settings_are_refused(tmp_path: Path) -> None:
    source = finished(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"other settings \(recipe\.new_tokens was 16, is 17\)"):
        setup.check_reuse(source, about(new_tokens=17))
    with pytest.raises(ConfigError, match=r"recipe\.buckets was \[256\], is \[128\]"):
        setup.check_reuse(source, about(buckets=(Bucket(length=128, rows=4),)))
    with pytest.raises(ConfigError, match=r"self_written was 3, is 4"):
        setup.check_reuse(source, about() | {"self_written": 4})
    (source / "rows.npz").unlink()
    with pytest.raises(ConfigError, match=r"has no rows\.npz to reuse; give the folder of a run"):
        setup.check_reuse(source, about())
    (source / "rows.npz").touch()
    (source / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        setup.check_reuse(source, about())
