"""Options of `dflash-jax serve --hosts`, checked before a process starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import main
from dflash_jax.hosts import launch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hosts", "0"], "--hosts is 0; expected an integer of at least 1"),
        (["--ray", "auto"], "--hosts is 1 with --ray; expected a number of processes, at least 2"),
        (["--hosts", "2", "--model", "b=tiny"], "--model cannot be used with --hosts 2; leave it"),
        (["--hosts", "2", "--prefix-folder", "x"], "--prefix-folder cannot be used with --hosts"),
        (["--hosts", "2", "--drafter-device", "1"], "--target-device and --drafter-device cannot"),
        (["--hosts", "2", "--weights", "int8"], "--weights other than float cannot be used"),
        (["--hosts", "2", "--kernels", "native"], "--kernels native cannot be used"),
        (["--hosts", "2", "--steps-per-call", "4"], "--steps-per-call above 1 cannot be used"),
        (["--hosts", "2", "--weight-layout", "tiled"], "--weight-layout cannot be used"),
        (["--hosts", "2", "--mesh", "1x3"], "--mesh 1x3 has 3 devices, which 2 hosts cannot share"),
    ],
)
def test_what_cannot_work_over_hosts_is_refused_at_once(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "ChildProcess", None)
    assert main(["serve", *flags]) == 1
    error = capsys.readouterr().err
    assert f"RequestError: {message}" in error
    assert error.count("\n") == 1


def test_without_ray_the_option_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--hosts", "2", "--ray", "auto"]) == 1
    assert "pip install -e '.[ray]'" in capsys.readouterr().err


def test_nothing_but_the_option_imports_ray() -> None:
    code = "import sys, dflash_jax.hosts.remote, dflash_jax.hosts.worker; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=ROOT
    )
    assert "dflash_jax.hosts.group" in found.stdout.split()
    assert not {"ray", "starlette", "uvicorn"} & {*found.stdout.split()}
