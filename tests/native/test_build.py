"""Compiling the native kernels: once, by any compiler there is, and never half."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import main
from dflash_jax.errors import NativeError
from dflash_jax.native import build as native
from dflash_jax.native.build import library

COMPILED = bool(library())
needs_compiler = pytest.mark.skipif(not COMPILED, reason=library().reason)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NativeError, match=r"no C\+\+ compiler.*g\+\+, or pip install ziglang"):
        native.find_compiler()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('test "$1" = --version || { echo "x.cc:1: error: no header" >&2; exit 1; }', "no header"),
        ('test "$1" = --version || kill -9 $$', "cannot compile the native kernels"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", text))
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "made"))
    with pytest.raises(NativeError, match=message):
        native.build(shown=False)
    assert not list((tmp_path / "made").iterdir())


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/cxx")
    with pytest.raises(NativeError, match="/nowhere/cxx cannot be run"):
        native.build(shown=False)


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "true"))
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "file" / "made"))
    with pytest.raises(NativeError, match=f"cannot be written to .*set {native.ENVIRONMENT} to"):
        native.build(shown=False)


def test_without_a_home_directory_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(NativeError, match=f"home directory. Set {native.ENVIRONMENT} to a folder"):
        native.build(shown=False)


def test_what_the_library_depends_on_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(tmp_path / "cxx", 'test "$1" = --version && echo one; exit 0')
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "made"))
    first = native.build(shown=False)
    assert native.build(shown=False) == first
    script(tmp_path / "cxx", 'test "$1" = --version && echo two; exit 0')
    second = native.build(shown=False)
    monkeypatch.setattr(native, "processor", lambda: "another")
    assert len({first, second, native.build(shown=False)}) == 3
    assert len(list((tmp_path / "made").iterdir())) == 3


def test_without_a_compiler_a_library_that_is_there_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose image was built with one."""
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "exit 0"))
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "made"))
    made = native.build(shown=False)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    assert native.build(shown=False) == made
    monkeypatch.setattr(native, "processor", lambda: "another")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler"):
        native.build(shown=False)


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    """Compiled without optimisation, to be quick."""
    code = (
        "from dflash_jax.native import build as native\n"
        "native.FLAGS = tuple(x.replace('-O3', '-O0') for x in native.FLAGS)\n"
        "from dflash_jax.native.build import library\n"
        "print(library().path)"
    )
    variables = os.environ | {native.ENVIRONMENT: str(tmp_path / "made"), "DFLASH_PROGRESS": "on"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=variables, **options) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in running]
    [made] = (tmp_path / "made").iterdir()
    assert [out.strip() for out, _ in outputs] == [str(made)] * 2
    assert any("compiling the native kernels" in error for _, error in outputs)


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        "-mno-avx512f",
        "-mno-avx512bw",  # vectors of 256 bits with dot products of bytes
        "-fsanitize=undefined -fno-sanitize-recover=all",
        "-fsanitize=address",
    ],
)
def test_kernels_are_right_for_other_processors(tmp_path: Path, options: str) -> None:
    """The tests of the kernels' numbers, with fewer features of the processor or with checks."""
    compiler = [*native.find_compiler(), *options.split()]
    variables = os.environ | {
        "CXX": " ".join(compiler),
        native.ENVIRONMENT: str(tmp_path / "made"),
    }
    if "address" in options:
        query = [[*compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
        ran = [subprocess.run(q, capture_output=True, text=True, check=True) for q in query]
        preloaded = [run.stdout.strip() for run in ran]
        if not all(Path(path).is_file() for path in preloaded):
            pytest.skip(f"{compiler[0]} has no address sanitizer")
        variables |= {"LD_PRELOAD": " ".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
        variables["JAX_PLATFORMS"] = "cpu"
    tests = [
        Path(__file__).with_name(f"test_{name}.py") for name in ("products", "layers", "widths")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *map(str, tests)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "skipped" not in run.stdout


def test_the_command_prints_the_path_or_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMPILED:
        assert main(["native"]) == 0
        assert capsys.readouterr().out.strip().endswith(".so")
    monkeypatch.setattr(native, "library", lambda: native.Library(None, "of a test"))
    assert main(["native"]) == 1
    assert "there are no native kernels: of a test" in capsys.readouterr().err
