"""Options of a training run on several hosts, and a run of two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_jax import distributed
from dflash_jax.cli import main
from dflash_jax.distributed import Group
from dflash_jax.errors import ConfigError
from dflash_jax.trainer.training import Placement


class TwoProcesses(Group):
    """Process 0 of two, without the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--hosts 0", "--hosts is 0; expected at least 1"),
        ("--hosts 2", "devices is 1 for 2 hosts; expected a multiple"),
        ("--hosts 2 --set devices=3", "buckets have [4] rows"),
        ("--hosts 2 --host 0 --set devices=2", "--host and --coordinator go together"),
        ("--hosts 2 --coordinator a:1 --set devices=2", "--host and --coordinator go together"),
        ("--host 2 --hosts 2 --coordinator a:1", "--host is 2 of --hosts 2; expected 0 to 1"),
        ("--host 0 --hosts 2 --coordinator a --set devices=2", "--coordinator is 'a'; expected"),
        ("--hosts 2 --host-wait 0 --set devices=2", "--host-wait is 0.0; expected a positive"),
    ],
)
def test_wrong_options_are_named(
    words: str, problem: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--preset", "smoke", "--out", out, *words.split()]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_devices_that_hosts_cannot_share_are_refused() -> None:
    with distributed.using(TwoProcesses()):
        with pytest.raises(ConfigError, match="devices is 3 for 2 hosts"):
            Placement(3)
        with pytest.raises(ConfigError, match="devices were asked for on host 0, but there are"):
            Placement(128)


@pytest.mark.exhaustive
def test_two_processes_train_a_drafter_like_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "It is 12."}]
    line = json.dumps({"messages": turns})
    (tmp_path / "data.jsonl").write_text(f"{line}\n" * 8)
    words = ["train", "--preset", "smoke", "--data", str(tmp_path / "data.jsonl"), "--json"]
    for setting in ("answers=given", "held_out=0", "steps=2", "buckets=32x4", "save_every=2"):
        words += ["--set", setting]
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main([*words, "--out", str(alone)]) == 0
    more = ["--hosts", "2", "--set", "devices=2", "--out", str(both)]
    ran = subprocess.run(
        [sys.executable, "-m", "dflash_jax", *words, *more],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["drafter"] == str(both / "drafter")
    assert (both / "drafter" / "model.safetensors").is_file()
    logged = [
        [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        for out in (alone, both)
    ]
    assert [[step["step"] for step in steps] for steps in logged] == [[1, 2]] * 2
    for one, two in zip(*logged, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient"] == pytest.approx(one["gradient"], rel=1e-3)
