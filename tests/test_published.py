"""Finding the drafter that was published for a target."""

import shutil
import sys
import warnings
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.cli.describe import describe
from dflash_jax.errors import CheckpointError
from dflash_jax.testing import tiny_target
from dflash_jax.utils import sources
from dflash_jax.utils.sources import DRAFTERS, PublishedDrafter, published_for

DRAFTER = "somebody/Made-DFlash"
PAGE = Path(__file__).parents[1] / "docs" / "drafters.md"


@pytest.fixture
def made(oracle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target for which a drafter was published that is in the hub's cache."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / f"models--{DRAFTER.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    copy(oracle / "drafters" / "v1_sliding", folder / "snapshots" / "abc123")
    target = copy(oracle / "drafters" / "target_qwen3", tmp_path / "Made-AWQ")
    config = describe(target, None).target.config
    shape = config.hidden_size, config.num_layers, config.vocab_size
    row = PublishedDrafter("somebody/Made", shape, DRAFTER, 8)
    monkeypatch.setattr(sources, "DRAFTERS", (*DRAFTERS, row))
    return target


def copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.npz"))
    return folder


def test_auto_takes_the_drafter_published_for_the_target(made: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = dj.load(made, "auto", layer_ids="zero-based")
    assert engine.graph.drafter_config is not None


def test_a_target_without_a_drafter_says_which_one_was_published(made: Path) -> None:
    with pytest.warns(UserWarning, match=f"drafter='auto' takes .*{DRAFTER}"):
        assert describe(made).drafter is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert describe(made, None).drafter is None


def test_auto_names_what_may_fit_a_target_of_another_name(made: Path) -> None:
    other = made.rename(made.parent / "Finetuned")
    with pytest.raises(CheckpointError, match=rf"no published .*Finetuned; .*{DRAFTER} \(for"):
        describe(other, "auto")


def test_auto_needs_the_hub_for_a_drafter_that_is_not_in_its_cache(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(made.parent / "empty"))
    with pytest.raises(CheckpointError, match=f"{DRAFTER} is no directory here.*install the extra"):
        describe(made, "auto")


def test_auto_is_the_own_drafter_of_the_shipped_target() -> None:
    assert describe("tiny", "auto") == describe("tiny") == describe("tiny", "tiny")


@pytest.mark.parametrize(
    "source",
    [
        "Qwen/Qwen3-8B",
        "models/Qwen3-8B-AWQ",
        "Qwen3-8B-Q4_K_M.gguf",
        "/x/Qwen3-8B-UD-IQ2_XXS.gguf",
        "/cache/models--Qwen--Qwen3-8B-GPTQ-Int4/snapshots/0123abc",
    ],
)
def test_targets_are_recognised_however_they_are_stored(source: str) -> None:
    config = tiny_target(hidden_size=4096, num_layers=36, vocab_size=151936)
    assert published_for(source, config)[0].drafter == "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize("source", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B", "x/Coder-Qwen3-8B"])
def test_other_models_of_a_shape_are_not_taken_for_it(source: str) -> None:
    config = tiny_target(hidden_size=4096, num_layers=36, vocab_size=151936)
    assert not published_for(source, config)


def test_the_page_lists_the_published_drafters() -> None:
    rows = [f"| {x.target} | {x.drafter} | {x.block} |" for x in DRAFTERS]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "/" in line and line.startswith("|")] == rows
