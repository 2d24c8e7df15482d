"""Compiling the native kernels: what a compiler that fails, hangs or is killed leaves."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_jax.errors import NativeError
from dflash_jax.kernels.native import compiling
from dflash_jax.kernels.native.compiling import AVX2, LEVELS
from tests.kernels.fake_compiler import compiler

VERSION = 'test "$1" = --version && exit 0\n'
# Starts a process, as compilers do, which would work for long, and writes its number to a file.
WITH_CHILD = VERSION + 'sleep 120 & echo $! >> "$0.children"\n'
WAITS = 60.0  # seconds within which something that happens at once must have happened


def run(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "working"
    folder.mkdir(exist_ok=True)
    command = [compiler(tmp_path / "cxx", text)]
    return compiling.compile_library(command, AVX2, folder)


def children(tmp_path: Path) -> list[int]:
    """Wait for the numbers of the processes that the compilers of the sources started."""
    path = tmp_path / "cxx.children"
    end = time.monotonic() + WAITS
    while time.monotonic() < end:
        lines = path.read_text().split() if path.exists() else []
        if len(lines) >= len(compiling.SOURCES):
            return list(map(int, lines))
        time.sleep(0.05)
    pytest.fail("the compilers did not start")


def ended(process: int) -> bool:
    """Wait until a process has ended."""
    end = time.monotonic() + WAITS
    while time.monotonic() < end:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        if fields[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NativeError, match=r"no C\+\+ compiler.*g\+\+, or pip install ziglang"):
        compiling.find_compiler()
    with pytest.raises(NativeError, match="jaxlib, whose headers"):
        compiling.include_folder()


def test_a_compiler_that_does_not_exist_is_named() -> None:
    with pytest.raises(NativeError, match="/nowhere/cxx cannot be run"):
        compiling.version_of(["/nowhere/cxx"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'echo "x.cc:1: error: no header" >&2; exit 1',
            "cannot compile .*: x.cc:1: error: no h",
        ),
        ("exit 3", "cannot compile the native kernels: exit code 3"),
        ("kill -9 $$", "was killed .is there enough memory"),
        ("exit 0", "wrote no native kernels"),
    ],
)
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(NativeError, match=message):
        run(tmp_path, text)


def test_a_full_disk_is_named_in_place_of_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"folder": 1 << 40}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        compiling.shutil, "disk_usage", lambda place: usage._replace(free=free["folder"])
    )
    with pytest.raises(NativeError, match="exit code 3"):
        run(tmp_path, "exit 3")
    free["folder"] = 3 << 20
    with pytest.raises(NativeError, match="working has only 3 MiB free; expected 32: free some"):
        run(tmp_path, "exit 3")


def test_a_compiler_that_is_killed_takes_its_children_with_it(tmp_path: Path) -> None:
    count = len(compiling.SOURCES)
    wait = f'while ! test "$(wc -l < "$0.children")" -ge {count}; do sleep 0.05; done\n'
    with pytest.raises(NativeError, match="was killed"):
        run(tmp_path, WITH_CHILD + wait + "kill -9 $$")
    assert all(map(ended, children(tmp_path)))


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE", 2.0)
    with pytest.raises(NativeError, match="not compiled in 2 s"):
        run(tmp_path, WITH_CHILD + "wait")
    started = (tmp_path / "cxx.children").read_text().split()
    assert all(map(ended, map(int, started)))


COMPILING = """
import sys
from pathlib import Path
from dflash_jax.kernels.native import compiling

compiling.compile_library([sys.argv[1]], compiling.AVX2, Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_ends_while_compiling_takes_the_compilers_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [compiler(tmp_path / "cxx", WITH_CHILD + "wait"), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING, *command], stderr=subprocess.DEVNULL
    ) as process:
        started = children(tmp_path)
        process.send_signal(number)
        assert process.wait(WAITS)
    assert all(map(ended, started))


def test_compilers_read_nothing_from_the_terminal(tmp_path: Path) -> None:
    text = 'cat; while test "$1" != -o; do shift; done; echo made > "$2"'
    assert run(tmp_path, text).read_text() == "made\n"


def test_levels_go_from_the_best_to_the_one_that_all_have() -> None:
    assert [level.name for level in LEVELS] == ["avx512", "avx_vnni", "avx2"]
    for level in LEVELS:
        assert level.needs >= AVX2.needs
        assert set(level.flags) >= set(AVX2.flags)
