"""Engines of two processes here: one decides, the other follows, and both end together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dflash_jax.utils.addresses import free_address

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    answers: Any  # the last line that it printed, as JSON
    said: str  # the last line of its errors


def start(index: int, address: str, case: str, *words: str) -> subprocess.Popen[str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if not address:
        flags += " --xla_force_host_platform_device_count=2"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.following", str(index), address, case, *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    lines = [line for line in out.splitlines() if line.startswith("[") and "Gloo" not in line]
    answers = json.loads(lines[-1]) if lines else None
    return Ended(process.returncode, answers, "\n".join(err.splitlines()[-1:]))


def run_two(case: str, *words: str) -> list[Ended]:
    address = free_address()
    return [ended(x) for x in [start(i, address, case, *words) for i in range(2)]]


@pytest.mark.timeout(900)
def test_two_processes_answer_as_one_with_as_many_devices_whatever_happens() -> None:
    """Cancelled, dropped, overdue, structured and recovered requests, and late compilation."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    first, second = run_two("events")
    assert (first.code, second.code) == (0, 0), (first.said, second.said)
    alone = ended(start(0, "", "events"))
    assert alone.code == 0, alone.said
    assert first.answers == alone.answers
    assert [list(x) for x in alone.answers[1][1].items()] == [["call_retry", 1]]


def test_a_follower_that_differs_is_named_before_it_dispatches() -> None:
    first, second = run_two("diverges")
    assert (first.code, second.code) == (1, 1)
    assert first.answers == ended(start(0, "", "plain", "--once")).answers
    difference = "the work of host 1 is {"
    assert second.said.startswith(f"dflash-jax: HostError: {difference}")
    assert '"steps": 7' in second.said
    assert "; give all hosts the same devices" in second.said
    expected = f"dflash-jax: HostError: host 1 is gone: HostError: {difference}"
    assert first.said.startswith(expected)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_one_by_name(victim: int) -> None:
    address = free_address()
    case = "killed" if victim else "plain"
    running = [start(i, address, case) for i in range(2)]
    if victim == 0:
        assert running[0].stdout is not None
        running[0].stdout.readline()
        running[0].kill()
    assert running[victim].wait(300) == -signal.SIGKILL
    since = time.monotonic()
    other = ended(running[1 - victim])
    assert time.monotonic() - since < 120
    assert other.code == 1
    assert other.said.startswith(f"dflash-jax: HostError: host {victim} is gone: it ")
    ended(running[victim])
