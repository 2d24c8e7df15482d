"""Short runs of a recipe: their statistics, and a run that is killed in every stage."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax.converters.models import open_model
from dflash_jax.errors import ConfigError
from dflash_jax.testing import tiny_target
from dflash_jax.trainer.recipes import new_drafter, recipe
from dflash_jax.trainer.rows import TokenRows
from dflash_jax.trainer.setup import read_start
from recipes.smollm2 import short_runs
from recipes.smollm2.__main__ import FOLDER, main, parser, unpacked_rounds

COMMON = ["--target", "tiny", "--preset", "smoke", "--turns", "60"]
SETTINGS = ["turn_tokens=48", "held_out=4", "taps=1,3", "turn_scripts=any", "steps=6"]


def answers(rounds: list[list[int]]) -> list[dict]:
    return [{"tokens": [1] * sum(lengths), "rounds": lengths} for lengths in rounds]


def test_gains_are_those_of_all_rounds_and_their_error_is_over_prompts() -> None:
    control = answers([[1, 2, 1], [2, 2], [1, 1, 1, 1]])
    better = answers([[2, 2], [3, 1], [1, 2, 1]])
    row = short_runs.compared(better, control)
    assert row["acceptance_length"] == round(12 / 7, 3)
    assert row["accepted_per_position"] == [round(4 / 7, 3), round(1 / 7, 3)]
    assert row["equal_answers"] == 3
    gain = row["acceptance_length_over_control"]
    assert gain["gain"] == round(12 / 7 - 12 / 9, 4)
    assert gain["low"] <= gain["gain"] <= gain["high"]
    assert gain["error"] > 0
    assert row["first_place_over_control"]["gain"] == round(4 / 7 - 3 / 9, 4)


def test_a_run_that_is_its_control_gains_exactly_nothing() -> None:
    same = answers([[1, 3], [2], [1, 1, 4]])
    gain = short_runs.compared(same, same)["acceptance_length_over_control"]
    assert set(gain.values()) == {0.0}


def test_pairing_by_prompt_leaves_the_spread_of_prompts_out_of_the_error() -> None:
    rng = np.random.default_rng(0)
    control = [rng.integers(1, 2 + i % 6, 40).tolist() for i in range(60)]
    better = [[n + 1 for n in rounds] for rounds in control]
    gain = short_runs.compared(answers(better), answers(control))["acceptance_length_over_control"]
    assert gain["gain"] == 1.0
    assert gain["error"] < 1e-6


def test_the_rows_of_all_rounds_are_joined_by_bucket() -> None:
    parts = [TokenRows(*(np.full((n, 4), n) for _ in range(3))) for n in (2, 3)]
    assert short_runs.joined(parts).tokens[:, 0].tolist() == [2, 2, 3, 3, 3]
    assert short_runs.joined(parts, 2).tokens[:, 0].tolist() == [2, 3, 3]


def test_lines_that_a_killed_process_began_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "decoded.jsonl"
    assert short_runs.read_lines(path) == []
    path.write_text('{"rounds": [1]}\n{"rounds": [2', encoding="utf-8")
    assert short_runs.read_lines(path) == [{"rounds": [1]}]


def test_rounds_are_those_there_are_from_the_chosen_one_on(tmp_path: Path) -> None:
    for seed in (1, 2, 4):
        (tmp_path / f"data-{seed}").mkdir()
    options = parser().parse_args([str(tmp_path), *COMMON, "short", "control", "--first-round=1"])
    assert [chosen.seed for chosen in unpacked_rounds(options)] == [1, 2]
    options.first_round = 3
    with pytest.raises(ConfigError, match=r"there is no smoke-3\.tar\.xz"):
        list(unpacked_rounds(options))


@pytest.mark.parametrize("name", short_runs.SHORT)
def test_every_short_run_goes_on_from_the_shipped_drafter(name: str) -> None:
    shipped: Any = open_model(FOLDER / "drafter", role="drafter").config
    target = tiny_target(
        hidden_size=shipped.hidden_size,
        num_layers=30,
        num_heads=shipped.num_heads,
        num_kv_heads=shipped.num_kv_heads,
        head_dim=shipped.head_dim,
        intermediate_size=shipped.intermediate_size,
        rms_norm_eps=shipped.rms_norm_eps,
        vocab_size=shipped.vocab_size,
    )
    chosen = recipe("smollm2-mixture", short_runs.settings(name))
    config = new_drafter(chosen, target, shipped.mask_token_id)
    assert config.step_width == shipped.step_width
    assert "fc" in read_start(FOLDER / "drafter", config)


@pytest.mark.soak
def test_a_short_run_killed_in_every_stage_ends_with_the_same_bytes(tmp_path: Path) -> None:
    own = [f"--set={x}" for x in SETTINGS]
    first = str(tmp_path / "first")
    for command in "data", "train":
        assert main([first, *COMMON, *own, command]) == 0
    words = [*COMMON, *own, "--set=save_every=2", "short", "chained"]
    words += ["--count", "1", "--start", f"{first}/v1/drafter"]
    complaints = tmp_path / "stderr"

    def start(folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipes.smollm2", str(folder), *words]
        with complaints.open("a") as stderr:
            return subprocess.Popen(command, stderr=stderr)

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in straight, killed:
        folder.mkdir()
        shutil.copytree(f"{first}/data", folder / "data-0")
    assert start(straight).wait() == 0, complaints.read_text()
    for stage in ("chained/state/2", "chained/decoded.jsonl", "chained-averaged/decoded.jsonl"):
        going, deadline = start(killed), time.monotonic() + 400
        while not (killed / stage).exists() and going.poll() is None:
            assert time.monotonic() < deadline, complaints.read_text()
            time.sleep(0.01)
        going.kill()
        going.wait()
    assert start(killed).wait() == 0, complaints.read_text()
    files = ["chained/drafter/model.safetensors", "chained/averaged/model.safetensors"]
    files += ["chained/decoded.jsonl", "chained-averaged/decoded.jsonl"]
    for file in files:
        assert (killed / file).read_bytes() == (straight / file).read_bytes(), file
    drafters = [(straight / file).read_bytes() for file in files[:2]]
    assert drafters[0] != drafters[1]
    table = json.loads((killed / "table.json").read_text(encoding="utf-8"))
    assert table["runs"].keys() == {"chained", "chained-averaged"}
    row = table["runs"]["chained"]
    assert row["steps"] == 6
    assert row["unseen"]["answers"] == 16
    assert row["held out"]["answers"] > 0
    assert row["simulated_chained"] >= 1
    log = [json.loads(line) for line in (killed / "chained/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert not (killed / "chained/state").exists()
    # Another run is compared with the control; `start` is the drafter without training.
    for name in "start", "control":
        words[words.index("short") + 1] = name
        assert start(killed).wait() == 0, complaints.read_text()
    runs = json.loads((killed / "table.json").read_text(encoding="utf-8"))["runs"]
    assert next(iter(runs)) == "control"
    for name in "chained", "chained-averaged", "start":
        assert runs[name]["unseen"]["equal_answers"] == 16
        assert runs[name]["unseen"]["acceptance_length_over_control"]["error"] >= 0
