"""The compiled kernels on disk: made once, checked before use, and nobody else's."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import main
from dflash_jax.errors import NativeError
from dflash_jax.kernels.native import build as native
from dflash_jax.kernels.native import compiling
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.compiling import AVX2
from dflash_jax.utils import private_folder
from tests.kernels.fake_compiler import VERSION_ONLY, WRITES, compiler, outputs

COMPILED = bool(library())
needs_compiler = pytest.mark.skipif(not COMPILED, reason=library().reason)


@pytest.fixture
def cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line for each output, and an empty folder for libraries."""
    path = tmp_path / "cxx"
    monkeypatch.setenv("CXX", compiler(path))
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "made"))
    return path


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.so"))


def build() -> Path:
    return native.build(AVX2, shown=False)


def test_a_compiler_that_fails_leaves_nothing(cxx: Path, tmp_path: Path) -> None:
    compiler(cxx, VERSION_ONLY + "exit 1")
    with pytest.raises(NativeError, match="cannot compile the native kernels"):
        build()
    assert [path.name for path in (tmp_path / "made").iterdir()] == [private_folder.LOCK]


def test_a_folder_that_cannot_be_made_is_named(
    cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "file" / "made"))
    with pytest.raises(NativeError, match=f"cannot be written to .*set {native.ENVIRONMENT} to"):
        build()


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
        native.build(AVX2, shown=False)


def test_what_the_library_depends_on_names_it(cxx: Path, tmp_path: Path) -> None:
    first = build()
    assert build() == first
    compiler(cxx, WRITES.replace("version 1", "version 2"))
    second = build()
    other = native.build(compiling.AVX512, shown=False)
    assert len({first, second, other}) == 3
    assert libraries(tmp_path / "made") == sorted(path.name for path in (first, second, other))
    assert {path.stat().st_mode & 0o777 for path in (first, second, other)} == {0o600}


def test_without_a_compiler_a_library_that_is_there_is_used(
    cxx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose image was built with one."""
    made = build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert build() == made
    with pytest.raises(NativeError, match=r"no C\+\+ compiler"):
        native.build(compiling.AVX512, shown=False)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def changed(path: Path) -> None:
    path.write_bytes(b"M" + path.read_bytes()[1:])


def linked(path: Path) -> None:
    other = path.parents[1] / "elsewhere.so"
    path.rename(other)
    path.symlink_to(other)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def writable(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spoil", [cut, empty, changed, linked, a_folder, a_pipe, writable])
def test_a_library_that_is_not_what_was_written_is_compiled_again(
    cxx: Path, caplog: pytest.LogCaptureFixture, spoil: object
) -> None:
    made = build()
    spoil(made)
    compiled = len(outputs(cxx))
    with caplog.at_level(logging.WARNING):
        assert build() == made
    assert len(outputs(cxx)) == 2 * compiled
    assert not made.is_symlink()
    assert made.read_bytes() == b"made\n"
    assert "are compiled again" in caplog.text
    assert build() == made
    assert len(outputs(cxx)) == 2 * compiled


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_library_in_a_folder_of_all_users_is_not_loaded(
    cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Its name can be predicted: from the sources, the compiler, and the planted contents."""
    planted = build()
    shared = planted.parent
    shared.chmod(mode)
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o700)
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(temporary))
    private_folder._of_this_user.cache_clear()
    found = build()
    private_folder._of_this_user.cache_clear()
    assert found.is_relative_to(temporary)
    assert libraries(shared) == [planted.name]


EIGHT = """
import os
from dflash_jax.kernels.native import build as native
from dflash_jax.kernels.native.compiling import AVX2

for _ in range(8):
    if not os.fork():
        os.write(1, f"{native.build(AVX2)}\\n".encode())  # `print` writes the line's end apart
        os._exit(0)
for _ in range(8):
    os.wait()
"""


@pytest.mark.exhaustive
def test_of_eight_processes_one_compiles_and_the_others_wait(cxx: Path) -> None:
    compiler(cxx, WRITES + "sleep 0.2")
    command = [sys.executable, "-W", "ignore", "-c", EIGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert len(set(lines)) == 1
    assert len(outputs(cxx)) == len(compiling.SOURCES) + 1
    assert done.stderr.count("compiling the native kernels") >= 1


def test_a_process_that_compiles_for_too_long_is_not_waited_for(
    cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "WAIT", 0.1)
    folder = private_folder.prepare(tmp_path / "made")
    with (
        private_folder.locked(folder, patience=1),
        pytest.raises(NativeError, match=f"another process .*set {native.ENVIRONMENT} to another"),
    ):
        build()
    assert outputs(cxx) == []


def test_what_a_killed_process_left_is_removed(cxx: Path, tmp_path: Path) -> None:
    left = private_folder.prepare(tmp_path / "made") / f"{compiling.WORKING}1"
    left.mkdir()
    (left / "products.o").write_text("half")
    made = build()
    assert sorted(path.name for path in made.parent.iterdir()) == [private_folder.LOCK, made.name]


def test_a_level_may_be_chosen_and_is_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, first in (
        ("", 0),
        ("on", 0),
        ("amx", 0),
        ("avx_vnni", 1),
        ("AVX2", 2),
        ("/folder", 0),
    ):
        monkeypatch.setenv(native.ENVIRONMENT, setting)
        for needs in (level.needs for level in compiling.LEVELS):
            monkeypatch.setattr(native, "features", lambda needs=needs: needs)
            usable = [level for level in compiling.LEVELS[first:] if level.needs <= needs]
            assert native.usable_levels() == usable
            assert usable[-1] == AVX2
    monkeypatch.setattr(native, "features", lambda: frozenset(["avx2", "fma"]))
    assert native.usable_levels() == []
    assert native._library.__wrapped__().reason == "the processor has no f16c"


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("avx2", ""),
        ("avx_vnni", ""),
        ("", "-fsanitize=undefined -fno-sanitize-recover=all"),
        ("", "-fsanitize=address"),
        ("avx512", "-fsanitize=undefined -fno-sanitize-recover=all"),  # without AMX
        ("avx512", "-fsanitize=address"),
    ],
)
def test_kernels_are_right_for_other_processors(tmp_path: Path, level: str, options: str) -> None:
    """The tests of the kernels' numbers, with fewer features of the processor or with checks."""
    if level not in ("", *(usable.name for usable in native.usable_levels())):
        pytest.skip(f"the processor has no {level}")
    compiler = [*compiling.find_compiler(), *options.split()]
    variables = os.environ | {
        "CXX": " ".join(compiler),
        native.ENVIRONMENT: level,
        "XDG_CACHE_HOME": str(tmp_path),
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
    tests += [Path(__file__).with_name("test_amx.py")] * (not level and not library().no_amx)
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
