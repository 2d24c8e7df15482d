"""Model files that are no regular files are refused, never ignored."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import COMPANIONS, open_model
from dflash_jax.errors import CheckpointError
from dflash_jax.families.configs import read_target_config
from dflash_jax.loading import locate, open_pair
from dflash_jax.model_files import FILES, MORE_TEMPLATES
from dflash_jax.tokenizer import Tokenizer


def pipe(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no pipes in folders")
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def broken(path: Path) -> None:
    path.symlink_to("missing")


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "neither a file nor a folder"),
    (loop, "a link to no file"),
    (broken, "a link to no file"),
    (Path.mkdir, "a folder"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for file in locate("tiny", "target").glob("*.json*"):
        shutil.copy(file, tmp_path)
    assert read_target_config(tmp_path)
    assert Tokenizer.from_directory(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("make", "told"), KINDS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_file_is_refused_by_name(
    model: Path, name: str, make: Callable[[Path], None], told: str
) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(CheckpointError, match=rf"{name} is {told}; expected a file"):
        read_target_config(model)


@pytest.mark.parametrize(("make", "told"), KINDS)
@pytest.mark.parametrize("name", [*FILES, f"{MORE_TEMPLATES}/default.jinja"])
def test_a_tokenizer_file_that_is_no_file_is_refused_by_name(
    model: Path, name: str, make: Callable[[Path], None], told: str
) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(CheckpointError, match=rf"{name} is {told}; expected a file"):
        Tokenizer.from_directory(model)


@pytest.mark.parametrize(("make", "told"), KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *COMPANIONS, f"{MORE_TEMPLATES}/default.jinja", "config.json", "checkpoint.json",
        "model.safetensors", "model.safetensors.index.json", "adapter_config.json",
    ],
)  # fmt: skip
def test_no_command_leaves_out_a_file_that_is_none(
    model: Path, name: str, make: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    weights = locate("tiny", "target") / "model.safetensors"
    if not name.startswith("model.safetensors"):
        shutil.copy(weights, model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    for opened in (open_pair, dj.load, dj.load_target, converted):
        with pytest.raises(CheckpointError, match=rf"{name} is {told}; expected a file"):
            opened(model)
    assert not (tmp_path.parent / "converted").exists()


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"]
)
def test_no_command_follows_a_link_to_another_file(model: Path, name: str, tmp_path: Path) -> None:
    shutil.copy(locate("tiny", "target") / "model.safetensors", model)
    (model / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        secret = Path(elsewhere, "credentials.json")
        secret.write_text("{}")
        (model / name).symlink_to(secret)
        for opened in (open_pair, dj.load_target, converted):
            with pytest.raises(CheckpointError, match=rf"{name} is a link to .*credentials\.json"):
                opened(model)
    assert not (tmp_path.parent / "converted").exists()


def converted(model: Path) -> None:
    convert(open_model(model), model.parent / "converted")


def test_a_link_to_a_file_is_that_file_and_an_absent_one_is_left_out(model: Path) -> None:
    (model / "config.json").rename(model / "blob")
    (model / "config.json").symlink_to("blob")
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "tokenizer_config.json").unlink(missing_ok=True)
    assert read_target_config(model)
    assert Tokenizer.from_directory(model)
