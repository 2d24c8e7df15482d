"""Checkpoints of parameter trees: round trips, and errors for damaged ones."""

import contextlib
import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dflash_jax import checkpoint
from dflash_jax.checkpoint import open_checkpoint, save
from dflash_jax.config import AttentionConfig, DrafterConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import config_classes
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.quant.layouts import MATRIX, pack
from dflash_jax.testing import (
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

CONFIGS = [tiny_target(), tiny_gemma(), tiny_gpt_oss(), tiny_hybrid(), tiny_moe()]
CONFIGS += [tiny_drafter(tiny_target(), kind) for kind in ("dflash", "dflash2", "dspark", "domino")]
PARAMS = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
    "layers_0": {"attention": {"q": np.arange(8).astype(ml_dtypes.bfloat16).reshape(2, 4)}},
    "layers_1": {"mixer": {"a_log": np.arange(3, dtype=np.float32) / 7}},
    "d2t": np.array([3, 1, 2], np.int32),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save(tmp_path / "x", tiny_target(), PARAMS, companions={"tokenizer.json": "{}"})
    return tmp_path / "x"


def test_saved_parameters_are_loaded_bit_for_bit(path):
    found = open_checkpoint(path)
    assert found.config == tiny_target()
    params = found.load()
    assert params.keys() == PARAMS.keys()
    q = params["layers_0"]["attention"]["q"]
    for ours, theirs in (
        (params["embed"], PARAMS["embed"]),
        (params["d2t"], PARAMS["d2t"]),
        (q, PARAMS["layers_0"]["attention"]["q"]),
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    narrow = found.load("bfloat16")
    np.testing.assert_array_equal(narrow["embed"], PARAMS["embed"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(narrow["d2t"], PARAMS["d2t"])
    decay = narrow["layers_1"]["mixer"]["a_log"]  # stays what it is
    np.testing.assert_array_equal(decay, PARAMS["layers_1"]["mixer"]["a_log"])
    assert (path / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="'int4' is not one of float32"):
        found.load("int4")


@pytest.mark.skipif(not library(), reason="no native kernels are compiled here")
def test_interleaved_weights_are_saved_as_they_were(tmp_path):
    params = {"layers_0": {"attention": {"q": np.arange(40, dtype=np.float32).reshape(2, 4, 5)}}}
    turned = {"layers_0": {"attention": dict(params["layers_0"]["attention"])}}
    set_weight_layout(turned, {"layers_0/attention/q": MATRIX}, native=True)
    save(tmp_path / "x", tiny_target(), turned)
    found = open_checkpoint(tmp_path / "x").load()["layers_0"]["attention"]["q"]
    np.testing.assert_array_equal(found, params["layers_0"]["attention"]["q"])


def test_packed_weights_are_not_saved(tmp_path):
    packed = {"head": pack(np.ones((4, 2), np.float32), (1, (("int8", 2),)))}
    with pytest.raises(CheckpointError, match=r"packed ones cannot.*weights='float'"):
        save(tmp_path / "x", tiny_target(), packed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_every_configuration_survives(tmp_path, monkeypatch, config):
    manifest = {"class": type(config).__name__, "fields": config.to_json()}
    assert checkpoint._config(json.loads(json.dumps(manifest))) == config


def test_every_configuration_class_is_tested():
    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    listed = config_classes()  # whose files are imported now
    ours = {c.__name__ for c in below(AttentionConfig) if c.__module__.startswith("dflash_jax.")}
    assert ours == {*listed, "AttentionConfig"}


def test_an_existing_place_is_kept_and_a_failure_leaves_nothing(path, monkeypatch):
    with pytest.raises(CheckpointError, match="exists; choose another place"):
        save(path, tiny_target(), PARAMS)
    with pytest.raises(CheckpointError, match="parameters of float64"):
        save(path, tiny_target(), {"x": np.zeros(2)}, overwrite=True)
    assert open_checkpoint(path).load()["embed"].shape == (3, 4)
    save(path, tiny_target(), {"x": np.ones(2, np.float32)}, overwrite=True)
    assert open_checkpoint(path).load().keys() == {"x"}
    assert [p.name for p in path.parent.iterdir()] == ["x"]


def test_special_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is neither a file nor a folder"):
        save(tmp_path / "pipe", tiny_target(), PARAMS, overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", [".", "..", "x/..", ""])
def test_impossible_names_are_refused(tmp_path, monkeypatch, name):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    with pytest.raises(CheckpointError, match="has no file name"):
        save(Path(name), tiny_target(), PARAMS, overwrite=True)


def test_a_folder_of_other_things_is_not_overwritten(tmp_path):
    place = tmp_path / "x"
    place.mkdir()
    save(place, tiny_target(), PARAMS, overwrite=True)  # an empty one is
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="so it is no model and is not overwritten"):
        save(tmp_path / "home", tiny_target(), PARAMS, overwrite=True)
    with pytest.raises(CheckpointError, match="is a mount point"):
        save(Path("/proc"), tiny_target(), PARAMS, overwrite=True)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/x")
    for _ in range(2):  # its target does not exist at first
        save(tmp_path / "link", tiny_target(), PARAMS, overwrite=True)
        assert [p.name for p in (tmp_path / "disk").iterdir()] == ["x"]
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "ring").symlink_to("ring")
    with contextlib.suppress(CheckpointError):  # or becomes a folder
        save(tmp_path / "ring", tiny_target(), PARAMS, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link", "ring"]


def test_a_name_may_be_as_long_as_names_may_be(tmp_path):
    save(tmp_path / ("x" * 255), tiny_target(), PARAMS)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / ("x" * 256), tiny_target(), PARAMS)
    assert [p.name for p in tmp_path.iterdir()] == ["x" * 255]


def test_a_signal_waits_until_the_folder_is_replaced(path, monkeypatch):
    real = Path.rename

    def rename(self, target):
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(path, tiny_target(), {"x": np.ones(2, np.float32)}, overwrite=True)
    assert [p.name for p in path.parent.iterdir()] == ["x"]
    assert open_checkpoint(path).load().keys() == {"x"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def weight_files(path: Path) -> list[Path]:
    return sorted(p for p in (path / "weights").rglob("*") if p.is_file() and p.stat().st_size)


def test_every_damaged_byte_of_the_weights_is_noticed(path):
    assert len(weight_files(path)) > 3
    for file in weight_files(path):
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            open_checkpoint(path).load()
        file.write_bytes(whole[:middle])
        with pytest.raises(CheckpointError, match=f"expected {len(whole)} bytes"):
            open_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            open_checkpoint(path)
        file.write_bytes(whole)
    open_checkpoint(path).load()


def outside(manifest):
    manifest["files"]["../x"] = {"bytes": 1, "crc32": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "has format 'other'; expected"),
        (lambda m: m.update(version=2), "has version 2; this program reads up to 1"),
        (lambda m: m["config"].update({"class": "Odd"}), "cannot be understood"),
        (lambda m: m["config"]["fields"].update(num_heads="x"), "cannot be understood"),
        (lambda m: m["config"]["fields"].pop("vocab_size"), "cannot be understood"),
        (lambda m: m["parameters"][0].update(dtype="int4"), "cannot be understood"),
        (lambda m: m.pop("files"), "cannot be understood"),
        (lambda m: next(iter(m["files"].values())).update(bytes=math.inf), "cannot be understood"),
        (outside, "names the file '../x' outside it"),
        (lambda m: m["parameters"][0].update(shape=[4, 3]), "its manifest says"),
        (
            lambda m: m["parameters"].append({"path": ["y"], "shape": [1], "dtype": "int32"}),
            "missing",
        ),
    ],
)
def test_a_contradictory_manifest_is_refused(path, change, message):
    manifest = json.loads((path / "checkpoint.json").read_text())
    change(manifest)
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).load()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format": 3}'])
def test_a_foreign_folder_is_refused(tmp_path, text):
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        open_checkpoint(tmp_path)


def test_drafters_keep_their_kind(tmp_path):
    config = tiny_drafter(tiny_target(), "dspark")
    save(tmp_path / "x", config, {"x": np.ones(2, np.float32)})
    found = open_checkpoint(tmp_path / "x").config
    assert isinstance(found, DrafterConfig)
    assert dataclasses.asdict(found) == dataclasses.asdict(config)
