"""The recipe of SmolLM2's drafters on a tiny target: killed in every stage, and its data reused."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = ["turn_tokens=48", "steps=24", "save_every=4", "held_out=4", "taps=1,3"]
SETTINGS += ["turn_scripts=any", "features=cache"]


def command(folder: Path) -> list[str]:
    line = [sys.executable, "-m", "recipes.smollm2", str(folder), "--target", "tiny"]
    line += ["--preset", "smoke", "--turns", "60", "--only", "v1", "one-layer"]
    return [*line, *(f"--set={x}" for x in SETTINGS)]


@pytest.mark.soak
def test_a_recipe_killed_in_every_stage_ends_with_the_same_bytes(tmp_path: Path) -> None:
    complaints = tmp_path / "stderr"

    def start(name: str) -> subprocess.Popen:
        with complaints.open("w") as stderr:
            return subprocess.Popen(command(tmp_path / name), stderr=stderr)

    assert start("straight").wait() == 0, complaints.read_text()
    rng, first = random.Random(0), tmp_path / "killed" / "v1"
    # Killed a moment after the first file of each stage is there.
    for stage in "run.json", "turns.jsonl", "answers.jsonl", "rows.npz", "state", "drafter":
        going, deadline = start("killed"), time.monotonic() + 180
        while not (first / stage).exists() and going.poll() is None:
            assert time.monotonic() < deadline, stage
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        going.kill()
        going.wait()
    assert start("killed").wait() == 0, complaints.read_text()
    for name in "v1", "one-layer":
        ours, theirs = (tmp_path / x / name for x in ("killed", "straight"))
        for file in "turns.jsonl", "answers.jsonl", "drafter/model.safetensors", "results.json":
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
        features = sorted((theirs / "features").glob("decoded*.npy"))
        assert features
        for path in features:
            assert (ours / "features" / path.name).read_bytes() == path.read_bytes()
    table = json.loads((tmp_path / "killed" / "table.json").read_text())
    assert table.keys() == {"v1", "one-layer"}
