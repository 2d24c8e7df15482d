"""Kills training at random and at chosen moments: `python -m tests.soak.kills [--count 20]`.

A small run is killed by SIGKILL up to three times, each time at a random change of a file in its
folder or after a random time, and then finishes. Its drafter and its log must be those of a run
that nobody killed. A row has the moments and what the folder held then; the exit code is 1 after a
difference or an error. A minute for each on two cores.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("answers=given", "held_out=0", "steps=12", "save_every=3", "buckets=32x4")
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
MOST_KILLS = 3
PATIENCE_S = 300.0
CHILD = """
import sys
from pathlib import Path
from tests.soak.kills import kill_at
kill_at(Path(sys.argv[1]), int(sys.argv[2]))
from dflash_jax.cli import main
sys.exit(main(sys.argv[3:]))
"""


def count_changes(folder: Path, seen: Any) -> None:
    """Call `seen` before each change of a file in a folder, from now on in this process."""
    prefix = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(prefix):
            writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & 0b11)
            if writes:
                seen()

    sys.addaudithook(hook)


def kill_at(folder: Path, number: int) -> None:
    """Kill this process before the given change of a file in a folder; 0 for never."""
    left = [number]

    def seen() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    count_changes(folder, seen)


def trained(out: Path, change: int, seconds: float) -> tuple[int, str]:
    """Train until a change, or for some seconds, or to the end; return exit code and errors."""
    words = ["train", "--preset", "smoke", "--out", str(out)]
    words += ["--data", str(out.parent / "data.jsonl")]
    for setting in SETTINGS:
        words += ["--set", setting]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out), str(change), *words],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        return process.returncode, errors


def result(out: Path) -> tuple[bytes, list[Any]]:
    """Return the drafter's weights, and the log without times."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return (out / "drafter" / "model.safetensors").read_bytes(), logged


def held(out: Path) -> str:
    """Return what the folder of a run holds."""
    names = [path.name for folder in (out, out / "state") if folder.is_dir()
             for path in folder.iterdir()]  # fmt: skip
    return " ".join(sorted(names)) or "nothing"


def attempt(out: Path, rng: random.Random, whole_s: float) -> tuple[list[str], str]:
    """Kill and resume a run; return its moments, and the error that ended it or nothing."""
    moments: list[str] = []
    for _ in range(rng.randint(1, MOST_KILLS)):
        change = rng.randint(1, 60) if rng.random() < 0.8 else 0
        seconds = PATIENCE_S if change else rng.uniform(0, whole_s)
        code, errors = trained(out, change, seconds)
        if code not in (0, -signal.SIGKILL):
            return moments, errors
        at = f"change {change}" if change else f"{seconds:.1f} s"
        moments.append(f"{at if code else f'{at}, after the end'}: {held(out)}")
    code, errors = trained(out, 0, PATIENCE_S)
    return moments, errors if code else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each run; return the exit code."""
    parser = argparse.ArgumentParser(description="Kill training runs, and resume them.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "It is 12, and that is that."},
        ]
        line = json.dumps({"messages": turns})
        (folder / "data.jsonl").write_text(f"{line}\n" * 16)
        trained(folder / "first", 0, PATIENCE_S)  # compiles
        began = time.monotonic()
        code, errors = trained(folder / "whole", 0, PATIENCE_S)
        whole_s = time.monotonic() - began
        if code:
            raise RuntimeError(errors)
        expected = result(folder / "whole")
        for seed in range(options.seed, options.seed + options.count):
            out = folder / f"killed{seed}"
            moments, error = attempt(out, random.Random(seed), whole_s)
            outcome = error.strip().rpartition("\n")[2] or (
                "equal" if result(out) == expected else "DIFFERENT"
            )
            wrong += outcome != "equal"
            print(f"{seed:3} {outcome}; killed at {'; '.join(moments)}", flush=True)
    print(f"{options.count - wrong} of {options.count} runs end as one that nobody killed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
