"""Commands in processes of their own: their lines, exit codes and ends."""

import signal
from pathlib import Path

import pytest

from dflash_jax.distributed import STOPPED
from dflash_jax.ray import commands
from dflash_jax.ray.commands import CommandProcess, follow, run_here
from dflash_jax.trainer.loop import StopFlag
from dflash_jax.utils.command import TERMINATED

WRONG = ("train", "--preset", "none-such", "--out", "unused")


def test_lines_and_exit_code_are_passed_on() -> None:
    shown: list[commands.Line] = []
    assert run_here(WRONG, lambda *line: shown.append(line)) == 1
    [(stream, line)] = shown
    assert stream == "stderr"
    assert line.startswith("dflash-jax: ConfigError: ")
    shown.clear()
    assert run_here(["--version"], lambda *line: shown.append(line)) == 0
    assert [stream for stream, _ in shown] == ["stdout"]


@pytest.mark.exhaustive
def test_errors_of_other_hosts_are_shown_once() -> None:
    shown: list[str] = []
    running = [CommandProcess(["--version"]), CommandProcess(WRONG), CommandProcess(["--version"])]
    assert follow(running, lambda _, line: shown.append(line), StopFlag()) == [0, 1, 0]
    assert len(shown) == 2
    assert shown[1].startswith("host 1: dflash-jax: ConfigError: ")
    shown.clear()
    running = [CommandProcess(WRONG), CommandProcess(WRONG)]
    assert follow(running, lambda _, line: shown.append(line), StopFlag()) == [1, 1]
    assert len(shown) == 1


@pytest.mark.exhaustive
def test_a_host_that_outlives_a_failed_one_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waits for hosts that will not come."""
    monkeypatch.setattr(commands, "PATIENCE", 2.0)
    waits = ["train", "--preset", "smoke", "--set", "devices=2", "--out", str(tmp_path / "run")]
    waits += ["--hosts", "2", "--host", "1", "--coordinator", "127.0.0.1:9"]
    running = [CommandProcess(WRONG), CommandProcess(waits)]
    assert follow(running, lambda *line: None, StopFlag()) == [1, -signal.SIGKILL]
    assert running[1].poll()[1] == -signal.SIGKILL


@pytest.mark.exhaustive
def test_a_stop_is_passed_on(tmp_path: Path) -> None:
    stop, shown = StopFlag(), []

    def show(_: str, line: str) -> None:
        shown.append(line)
        stop.raised = True

    words = ["train", "--preset", "smoke", "--out", str(tmp_path / "run")]
    [code] = follow([CommandProcess(words)], show, stop)
    assert code in (STOPPED, TERMINATED)  # while it answers, and before
    assert not list(tmp_path.glob("run/drafter"))
