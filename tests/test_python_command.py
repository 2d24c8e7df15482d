"""Processes that the package starts: none runs code of the folder that it is started in."""

import ast
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax.engine.structured import trial_process
from dflash_jax.kernels.native import compiling
from dflash_jax.utils.child_processes import on_this_machine, start_module
from dflash_jax.utils.python_command import python_command

ROOT = Path(__file__).parents[1]
HELPER = ROOT / "dflash_jax" / "utils" / "python_command.py"
MODULES = ("dflash_jax", "ziglang", "converters", "json", "dataclasses", "llguidance")
MARK = 'from pathlib import Path; Path(__file__).parents[{up}].joinpath("ran").touch()\n'


@pytest.fixture(autouse=True)
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, whose modules leave a file when they run."""
    for name in MODULES:
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (tmp_path / name / file).write_text(MARK.format(up=1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_other_processes_of_a_group_do_not_run_the_current_folder(hostile: Path) -> None:
    with on_this_machine(lambda index: ("dflash_jax", "--version"), 2):
        pass
    assert not (hostile / "ran").exists()


def test_modules_of_the_package_do_not_run_the_current_folder(hostile: Path) -> None:
    process = start_module(("dflash_jax", "--version"), stdout=subprocess.PIPE)
    assert b"dflash" in process.communicate(timeout=60)[0]
    assert process.returncode == 0
    command = python_command(trial_process.__file__)
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stderr=nothing, timeout=60, check=False)
    assert not (hostile / "ran").exists()


def test_a_compiler_from_a_package_does_not_run_the_current_folder(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    compiling.version_of(compiling.find_compiler())
    assert not (hostile / "ran").exists()


def processes(path: Path) -> Iterator[str]:
    """Yield where a file names Python's program, or the modules that start others with it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
        named = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
        if named or "multiprocessing" in names or "ProcessPoolExecutor" in names:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_python_process_is_started_by_the_one_command() -> None:
    files = [*(ROOT / "dflash_jax").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]
    assert [x for path in files if path != HELPER for x in processes(path)] == []
