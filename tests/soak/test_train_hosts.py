"""Training by two processes: the same drafter, exact resumption, and ends without a hang."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax.converters.models import open_model
from dflash_jax.utils.addresses import free_address

pytestmark = pytest.mark.soak
SETTINGS = ("answers=given", "held_out=0", "steps=40", "save_every=5")
BOUND = 60  # seconds in which a host notices that another one is gone


def command(out: Path, *more: str, devices: int = 4) -> list[str]:
    words = [sys.executable, "-m", "dflash_jax", "train", "--preset", "smoke", "--out", str(out)]
    words += ["--data", str(out.parent / "data.jsonl")]
    for setting in (*SETTINGS, f"devices={devices}"):
        words += ["--set", setting]
    return [*words, *more]


def start(words: Sequence[str], err: Path, virtual: int = 0) -> subprocess.Popen[bytes]:
    flags = f"--xla_force_host_platform_device_count={virtual}" if virtual else ""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with err.open("wb") as stderr:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)


@contextlib.contextmanager
def pair(out: Path, *more: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two hosts as on two machines; their errors are in `out`.0.err and `out`.1.err."""
    words = command(out, "--hosts", "2", "--coordinator", free_address(), *more)
    running = [start([*words, "--host", str(i)], errors(out, i)) for i in range(2)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def errors(out: Path, host: int) -> Path:
    return out.with_name(f"{out.name}.{host}.err")


def wait_for(text: str, err: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while text not in err.read_text():
        assert process.poll() is None, err.read_text()
        assert time.monotonic() < until, err.read_text()
        time.sleep(0.05)


def whole(out: Path, *more: str, virtual: int = 0, devices: int = 4) -> Path:
    err = errors(out, 0)
    ended = start(command(out, *more, devices=devices), err, virtual).wait(600)
    assert ended == 0, err.read_text()
    return out


def leaves(out: Path) -> list[np.ndarray]:
    drafter = open_model(out / "drafter", role="drafter").load("float32")
    return [np.asarray(x) for x in jax.tree.leaves(drafter)]


def losses(out: Path) -> np.ndarray:
    lines = (out / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    return np.asarray([json.loads(line)["loss"] for line in lines])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    turns = [
        {"role": "user", "content": "Add {}."},
        {"role": "assistant", "content": "It is 12, and that is that."},
    ]
    lines = [json.dumps({"messages": turns}).replace("{}", str(i)) for i in range(40)]
    found = tmp_path_factory.mktemp("hosts")
    (found / "data.jsonl").write_text("\n".join(lines) + "\n")
    return found


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """A run of two processes with two devices each."""
    return whole(folder / "two", "--hosts", "2")


def test_two_hosts_train_the_drafter_of_one(folder: Path, two: Path) -> None:
    """With a device each, sums have two terms, and no order."""
    one = whole(folder / "one", virtual=2, devices=2)
    alike = whole(folder / "alike", "--hosts", "2", devices=2)
    for x, y in zip(leaves(one), leaves(alike), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(losses(one), losses(alike))
    four = whole(folder / "four", virtual=4)
    np.testing.assert_allclose(losses(two)[:10], losses(four)[:10], rtol=1e-3)


def test_a_cache_of_features_is_filled_by_one_host_and_read_by_both(folder: Path) -> None:
    settings = ("--set", "features=cache")
    one = whole(folder / "cached-one", *settings, virtual=2, devices=2)
    alike = whole(folder / "cached", "--hosts", "2", *settings, devices=2)
    for x, y in zip(leaves(one), leaves(alike), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_ends_the_other_and_the_same_command_resumes(
    folder: Path, two: Path, victim: int
) -> None:
    out = folder / f"killed{victim}"
    with pair(out) as running:
        wait_for("drafter 15/", errors(out, 0), running[0])
        running[victim].kill()
        assert running[1 - victim].wait(BOUND) == 1
    said = errors(out, 1 - victim).read_text().splitlines()[-1]
    assert said.startswith(f"dflash-jax: HostError: host {victim} is gone: it ")
    assert said.endswith("; run the same command to go on")
    assert {path.name for path in (out / "state").iterdir()} & {"10", "15"}
    with pair(out) as running:
        assert [process.wait(300) for process in running] == [0, 0], errors(out, 0).read_text()
    for x, y in zip(leaves(out), leaves(two), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(losses(out), losses(two))


@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_at_either_host_saves_and_stops_both(folder: Path, two: Path, host: int) -> None:
    out = folder / f"stopped{host}"
    with pair(out) as running:
        wait_for("drafter 10/", errors(out, 0), running[0])
        running[host].send_signal(signal.SIGTERM)
        assert [process.wait(BOUND) for process in running] == [3, 3]
    said = errors(out, 0).read_text().splitlines()[-1]
    stopped = r"drafter stopped at step (\d+) of 40; state saved; run the same command to go on"
    found = re.fullmatch(f"dflash-jax: {stopped}", said)
    assert found, said
    assert found[1] in {path.name for path in (out / "state").iterdir()}
    whole(out, "--hosts", "2")
    for x, y in zip(leaves(out), leaves(two), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_signal_stops_the_processes_that_were_started_here(folder: Path) -> None:
    out = folder / "local"
    process = start(command(out, "--hosts", "2"), errors(out, 0))
    try:
        wait_for("drafter 10/", errors(out, 0), process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.is_file():
            pytest.skip("this system does not list child processes")
        [child] = map(int, children.read_text().split())
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 3
        until = time.monotonic() + BOUND
        while Path(f"/proc/{child}/cmdline").is_file() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}/cmdline").is_file()
    finally:
        process.kill()
        process.wait()
    said = errors(out, 0).read_text()
    assert said.count("state saved") == 1
    assert "HostError" not in said


def test_an_error_of_host_0_is_printed_by_both(folder: Path) -> None:
    out = folder / "wrong"
    with pair(out, "--data", str(folder / "none.jsonl")) as running:
        assert [process.wait(120) for process in running] == [1, 1]
    first, second = (errors(out, i).read_text().splitlines()[-1] for i in range(2))
    assert re.match(r"dflash-jax: \w+: .*none\.jsonl", first)
    reason = first.removeprefix("dflash-jax: ")
    assert second.startswith(f"dflash-jax: HostError: host 0 is gone: {reason}")


def test_hosts_with_folders_of_their_own_are_refused(folder: Path) -> None:
    address = free_address()
    outs = [folder / "a", folder / "b"]
    running = [
        start([*command(out, "--hosts", "2", "--coordinator", address), "--host", str(i)],
              errors(out, i))
        for i, out in enumerate(outs)
    ]  # fmt: skip
    try:
        assert [process.wait(120) for process in running] == [1, 1]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = errors(outs[1], 1).read_text().splitlines()[-1]
    assert "HostError" in said
    assert "is not the folder that host 0 writes; give an --out in a file system" in said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_killed_before_the_first_step_ends_the_other(folder: Path, victim: int) -> None:
    out = folder / f"early{victim}"
    with pair(out, "--set", "answers=target", "--set", "prompts=36") as running:
        wait_for("using 36 of", errors(out, 0), running[0])  # host 0 answers, host 1 waits
        running[victim].kill()
        assert running[1 - victim].wait(BOUND) == 1
    said = errors(out, 1 - victim).read_text().splitlines()[-1]
    assert f"HostError: host {victim} is gone" in said
    assert not (out / "state").exists()


def test_a_budget_gives_all_hosts_the_steps_of_host_0(folder: Path) -> None:
    out = folder / "budget"
    settings = ("--set", "steps=4000", "--budget", "0.1min")
    err = errors(out, 0)
    assert start(command(out, "--hosts", "2", *settings), err).wait(300) == 0, err.read_text()
    steps = json.loads((out / "steps.json").read_text())["steps"]
    assert 1 <= steps < 4000
    assert len((out / "log.jsonl").read_text().splitlines()) == steps
