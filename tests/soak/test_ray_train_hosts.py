"""Training by two processes that Ray places, here on one machine."""

import os
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.soak.test_train_hosts import command, errors, leaves, losses, start, wait_for, whole
from tests.soak.test_train_hosts import folder as folder  # a fixture

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
ON_RAY = ("--hosts", "2", "--ray", "local")


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """A run of two processes without Ray."""
    return whole(folder / "two", "--hosts", "2", devices=2)


def hosts_of(out: Path) -> list[int]:
    """Return the processes that train into a folder, by host."""
    listed = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True)
    found = [line.split() for line in listed.stdout.splitlines() if f"{out} " in line]
    by_host = {words[words.index("--host") + 1]: words[0] for words in found if "--host" in words}
    return [int(by_host[host]) for host in sorted(by_host)]


def assert_same(one: Path, other: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, leaves(one), leaves(other))
    np.testing.assert_array_equal(losses(one), losses(other))


def test_a_killed_host_is_replaced(folder: Path, two: Path) -> None:
    out = folder / "replaced"
    process = start(command(out, *ON_RAY, devices=2), errors(out, 0))
    wait_for("drafter 5/", errors(out, 0), process)
    os.kill(hosts_of(out)[1], signal.SIGKILL)
    assert process.wait(300) == 0, errors(out, 0).read_text()
    assert "host 1 was lost; all hosts start again" in errors(out, 0).read_text()
    assert_same(out, two)
    assert not hosts_of(out)


def test_a_signal_saves_and_stops_all_and_the_same_command_resumes(folder: Path, two: Path) -> None:
    out = folder / "stopped"
    process = start(command(out, *ON_RAY, devices=2), errors(out, 0))
    wait_for("drafter 10/", errors(out, 0), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3, errors(out, 0).read_text()
    assert not hosts_of(out)
    assert_same(whole(out, *ON_RAY, devices=2), two)


def test_no_host_is_left_when_the_command_is_killed(folder: Path) -> None:
    out = folder / "killed"
    process = start(command(out, *ON_RAY, "--set", "steps=4000", devices=2), errors(out, 0))
    wait_for("drafter 10/", errors(out, 0), process)
    assert len(hosts_of(out)) == 2
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while hosts_of(out):
        assert time.monotonic() < end
        time.sleep(0.2)


def test_prompts_are_answered_before_the_hosts_start(folder: Path) -> None:
    settings = ("--set", "answers=target", "--set", "prompts=8", "--set", "new_tokens=8")
    one = whole(folder / "asked-one", *settings, "--hosts", "2", devices=2)
    other = whole(folder / "asked", *settings, *ON_RAY, devices=2)
    assert (one / "answers.jsonl").read_bytes() == (other / "answers.jsonl").read_bytes()
    assert_same(one, other)
