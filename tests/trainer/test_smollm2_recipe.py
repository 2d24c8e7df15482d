"""The recipe of SmolLM2's drafters on a tiny target: killed in every stage, and its data reused."""

import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.testing import tiny_drafter, tiny_target
from dflash_jax.trainer.recipes import recipe
from dflash_jax.trainer.rows import load as rows_of
from dflash_jax.trainer.setup import OF_ROWS
from recipes.smollm2 import card
from recipes.smollm2.__main__ import ARCHIVES, main, unpack

SETTINGS = ["turn_tokens=48", "steps=24", "save_every=4", "held_out=4", "taps=1,3"]
SETTINGS += ["turn_scripts=any", "features=cache"]


STAGES = {"data": ("run.json", "turns.jsonl", "answers.jsonl", "rows.npz"),
          "v1": ("state", "drafter")}  # fmt: skip


def line(folder: Path, *command: str) -> list[str]:
    common = ["--target", "tiny", "--preset", "smoke", "--turns", "60"]
    return [str(folder), *common, *(f"--set={x}" for x in SETTINGS), *command]


DATA, TRAIN = ("data",), ("train",)


@pytest.mark.soak
def test_a_recipe_killed_in_every_stage_ends_with_the_same_bytes(tmp_path: Path) -> None:
    complaints = tmp_path / "stderr"

    def start(name: str, *command: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "recipes.smollm2", *line(tmp_path / name, *command)]
        with complaints.open("w") as stderr:
            return subprocess.Popen(words, stderr=stderr)

    rng = random.Random(0)
    for command, (run, stages) in zip((DATA, TRAIN), STAGES.items(), strict=True):
        assert start("straight", *command).wait() == 0, complaints.read_text()
        # Killed a moment after the first file of each stage is there.
        for stage in stages:
            going, deadline = start("killed", *command), time.monotonic() + 180
            while not (tmp_path / "killed" / run / stage).exists() and going.poll() is None:
                assert time.monotonic() < deadline, stage
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            going.kill()
            going.wait()
        assert start("killed", *command).wait() == 0, complaints.read_text()
    ours, theirs = tmp_path / "killed", tmp_path / "straight"
    features = [p.relative_to(theirs) for p in theirs.glob("data/features/*/decoded*.npy")]
    assert features
    results = "v1/drafter/model.safetensors", "v1/results.json"
    for file in "data/turns.jsonl", "data/answers.jsonl", *features, *results:
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


@pytest.mark.soak
def test_packed_answers_give_the_rows_they_were_packed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "smoke.tar.xz"
    assert main(line(tmp_path / "first", *DATA)) == 0
    for _ in range(2):
        assert main(line(tmp_path / "first", "pack", "--archive", str(archive))) == 0
        packed = archive.read_bytes()
    assert archive.read_bytes() == packed
    monkeypatch.setattr("recipes.smollm2.__main__.ARCHIVES", tmp_path)
    monkeypatch.setattr("dflash_jax.trainer.regenerate.local_decoder", no_decoder)
    assert main(line(tmp_path / "second", *DATA, "--shipped")) == 0
    assert main(line(tmp_path / "second", *TRAIN)) == 0
    shipped = tmp_path / "shipped"
    assert main(line(tmp_path / "second", "ship", "--folder", str(shipped))) == 0
    assert {path.name for path in shipped.iterdir()} == {"README.md", "drafter", "results.json"}
    prompt = "Count from 3 to 9."
    with contextlib.closing(dj.load("tiny", shipped / "drafter")) as drafted:
        assert drafted.plan.block == 3  # two drafts, as the shipped config advises
        answer = drafted.generate(prompt, max_tokens=24)
        assert (
            answer.token_ids == drafted.generate(prompt, max_tokens=24, speculative=False).token_ids
        )


@pytest.mark.soak
def test_a_mixture_is_packed_with_its_kinds_and_measured_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "smoke.tar.xz"
    own = ["mixture=chat:1,code:1,arithmetic:1", "follow_ups=0.4", "greedy_share=0.5"]
    own += ["temperature=0.7", "anchors=0", "weights=dpace", "features=online", "held_out=12"]
    common = [f"--set={x}" for x in own]

    def run(folder: str, *command: str) -> None:
        words = line(tmp_path / folder, *command)
        assert main([words[0], *words[1 : -len(command)], *common, *command]) == 0

    run("first", *DATA)
    run("first", "pack", "--archive", str(archive))
    monkeypatch.setattr("recipes.smollm2.__main__.ARCHIVES", tmp_path)
    monkeypatch.setattr("dflash_jax.trainer.regenerate.local_decoder", no_decoder)
    run("second", *DATA, "--shipped")
    for name in ("answers.jsonl", "turns.code.jsonl", "turns.follow-up.jsonl"):
        made = [(tmp_path / folder / "data" / name).read_bytes() for folder in ("first", "second")]
        assert made[0] == made[1], name
    run("second", *TRAIN)
    results = json.loads((tmp_path / "second/v1/results.json").read_text(encoding="utf-8"))
    assert {"chat", "code", "arithmetic"} & results.keys()
    assert not (tmp_path / "second/data/features").exists()


@pytest.mark.soak
def test_drafters_of_several_shapes_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = ["one-layer", "block-8"]
    words = line(tmp_path, *DATA)
    assert main(words) == 0
    settings = [f"--set={x}" for x in ("steps=6", "held_out_tokens=16")]
    compared = [*words[:-1], *settings, "compare", "--only", *names]
    assert main(compared) == 0
    printed = capsys.readouterr().err
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert list(table["drafters"]) == names
    for name, found in table["drafters"].items():
        assert found["steps"] == 6
        assert found["acceptance_length"] >= 1
        assert found["cost"] == round(found["decode_step_ms"] / table["plain_step_ms"], 2)
        assert f"| {name} | " in printed
    log = tmp_path / "short/block-8/log.jsonl"
    before = log.read_bytes()
    assert main(compared) == 0
    assert log.read_bytes() == before  # trained once
    start = ["--start", str(tmp_path / "short/one-layer/drafter")]
    assert main([*compared[:-3], *start, "--only", "dspark"]) == 0
    table = json.loads((tmp_path / "kinds.json").read_text(encoding="utf-8"))
    assert list(table["drafters"]) == ["dspark"]


def test_names_of_drafters_that_are_not_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(line(tmp_path, "compare", "--start", "x", "--only", "v1", "block-8")) == 2
    told = capsys.readouterr().err
    assert "block-8: with --start, one of v1, dspark, dflash2, domino" in told
    assert main(line(tmp_path, "compare", "--only", "domino")) == 2
    assert "domino: without --start, one of v1, one-layer" in capsys.readouterr().err


def no_decoder(*arguments: object, **options: object) -> None:
    """Stand in for the decoder of answers, all of which are packed."""


def test_answers_that_are_not_shipped_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(line(tmp_path, "data", "--shipped")) == 2
    assert "there is no smoke.tar.xz; run `data` without --shipped" in capsys.readouterr().err
    assert main(["--set", "seed=7", *line(tmp_path, "data", "--shipped")]) == 2
    assert "there is no smoke-7.tar.xz" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_data_must_be_there_to_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(line(tmp_path, "pack", "--archive", str(tmp_path / "x"))) == 2
    assert "has no answers.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_drafter_must_be_trained_to_be_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(line(tmp_path, "ship", "--folder", str(tmp_path / "x"))) == 2
    assert "has no trained and measured drafter; run `train` first" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_card_has_the_curve_and_the_figures() -> None:
    log = [
        {"loss": 8 - i / 6, "simulated": 1 + i / 24, "places": 100.0, "seconds": 150.0}
        for i in range(24)
    ]
    row = {"prompts": 4, "tokens": 99, "acceptance_length": 2.345, "accepted_per_position": [0.8]}
    results = {"max_tokens": 64, "chat": row}
    masks = [np.array([False, True, True])] * 7
    shipped = tiny_drafter(tiny_target(), block_size=6, windows=(256, 256), speculative_tokens=3)
    lines = card.text(recipe("smollm2"), results, log, masks, 27_400_000, shipped).splitlines()
    assert "| 2 | 200 | 7.92 | 1.02 |" in lines
    assert "| 24 | 2,400 | 4.25 | 1.94 |" in lines
    assert "| chat | 4 | 99 | 2.35 | 0.80 |" in lines
    words = " ".join(lines)
    for text in (
        "7 answers, 14 tokens",
        "27 MB",
        "draft 5 tokens at once, of which a step uses 3",
        "1.0 hours on",
        "1, 8, 14, 21, 27",
        "It sees the last 256",
    ):
        assert text in words


@pytest.mark.sample("smollm2")
@pytest.mark.parametrize("preset", ["smollm2", "smollm2-mixture"])
def test_the_shipped_answers_are_those_of_the_preset(preset: str, tmp_path: Path) -> None:
    unpack(ARCHIVES / f"{preset}.tar.xz", tmp_path / "data")
    recorded = json.loads((tmp_path / "data/run.json").read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(recipe(preset).settings))
    for name in OF_ROWS:
        assert recorded["recipe"].get(name) == asked.get(name), name
    assert recorded["self_written"] == recipe(preset).prompts
    rows = rows_of(tmp_path / "data/rows.npz")
    assert [part.tokens.shape[1] for part in rows] == [b["length"] for b in asked["buckets"]]
    assert sum(int(part.wanted.sum()) for part in rows) > 500_000
