"""Compiling the native kernels from their sources, by any C++ compiler. Needs no JAX.

A library is compiled for a level of the processor's features, the same way on a user's machine and
for a wheel, so that both compute the same bits.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_jax.errors import NativeError
from dflash_jax.utils.python_command import python_command

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cc")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-DNDEBUG")
PATIENCE = 300.0  # seconds after which compiling is given up
NEEDED = 32 << 20  # bytes that compiling may write; with less, a failure is that of a full disk
WORKING = ".compiling-"  # prefix of a folder in which a library is compiled
# Runs a command, and ends it with all its processes when standard input ends, as it does when the
# process that has its other end is killed.
GUARD = 'exec 3<&0; { read -r _ <&3; kill -KILL 0; } & "$@" </dev/null 3<&-'


@dataclasses.dataclass(frozen=True)
class Level:
    """Features of a processor that a library is compiled for.

    Attributes:
      needs: their names, as Linux lists them.
      flags: flags of compilers.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


def _level(name: str, needs: str, flags: str, base: Level | None = None) -> Level:
    known = (base.needs, base.flags) if base else (frozenset(), ())
    return Level(name, known[0] | set(needs.split()), (*known[1], *flags.split()))


AVX2 = _level("avx2", "avx2 fma f16c", "-mavx2 -mfma -mf16c")
AVX_VNNI = _level("avx_vnni", "avx_vnni", "-mavxvnni", AVX2)
AVX512 = _level(
    "avx512",
    "avx512f avx512bw avx512dq avx512vl avx512_vnni",
    "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni",
    AVX2,
)
LEVELS = (AVX512, AVX_VNNI, AVX2)  # the best first


def digest(parts: Sequence[str]) -> str:
    """Return a short digest of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def source_texts() -> list[str]:
    """Return everything that libraries of all levels are compiled from."""
    return [*(path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)), *FLAGS]


def include_folder() -> Path:
    """Return the folder of XLA's headers, which jaxlib installs.

    Raises:
      NativeError: jaxlib is not installed.
    """
    module_spec = importlib.util.find_spec("jaxlib")
    if module_spec is None or not module_spec.submodule_search_locations:
        raise NativeError("jaxlib, whose headers the native kernels need, is not installed")
    return Path(module_spec.submodule_search_locations[0]) / "include"


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C++ compiler: `CXX`, the system's, or that of the package ziglang.

    Raises:
      NativeError: there is none.
    """
    if command := os.environ.get("CXX", "").split():
        return tuple(command)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return tuple(python_command("-m", "ziglang", "c++"))
    raise NativeError(
        "there is no C++ compiler for the native kernels; install one, such as the system's g++, or"
        " pip install ziglang"
    )


def version_of(compiler: Sequence[str]) -> str:
    """Return the version that a compiler prints.

    Raises:
      NativeError: it cannot be run.
    """
    try:
        return subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the C++ compiler {compiler[0]} cannot be run: {error}") from error


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder to compile in, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=WORKING, dir=parent) as folder:
        yield Path(folder)


def compile_library(
    compiler: Sequence[str], level: Level, folder: Path, linking: Sequence[str] = ()
) -> Path:
    """Compile a library inside a folder; return its path.

    Each source is compiled by a process of its own. However this ends, by an error, an interrupt or
    the end of this process, these processes end, too.

    Args:
      linking: further options, for linking.

    Raises:
      NativeError: the compiler fails, or takes too long.
    """
    end = time.monotonic() + PATIENCE
    command = [*compiler, *FLAGS, *level.flags]
    including = ["-isystem", str(include_folder()), "-c"]
    objects = [str(folder / f"{level.name}-{source.stem}.o") for source in SOURCES]
    pairs = zip(SOURCES, objects, strict=True)
    _run([[*command, *including, str(source), "-o", made] for source, made in pairs], folder, end)
    path = folder / f"{level.name}.so"
    _run([[*command, "-shared", *objects, *linking, "-o", str(path)]], folder, end)
    if not path.is_file() or not path.stat().st_size:
        raise NativeError(f"{compiler[0]} wrote no native kernels")
    return path


def _run(commands: list[list[str]], folder: Path, end: float) -> None:
    """Run commands at the same time until all have ended, or one has failed."""
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                running.append(
                    subprocess.Popen(
                        ["/bin/sh", "-c", GUARD, "sh", *command],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # a group of processes, which can be killed
                    )
                )
        for command, log, process in zip(commands, logs, running, strict=True):
            if code := process.wait(max(end - time.monotonic(), 0)):
                raise NativeError(
                    f"{command[0]} cannot compile the native kernels: {_failure(log, code, folder)}"
                )
    except subprocess.TimeoutExpired as error:
        raise NativeError(
            f"the native kernels were not compiled in {PATIENCE:.0f} s, and are given up"
        ) from error
    except OSError as error:
        raise NativeError(f"the native kernels could not be compiled: {error}") from error
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _failure(log: Path, code: int, folder: Path) -> str:
    for place in (folder, Path(tempfile.gettempdir())):  # compilers write to both
        free = shutil.disk_usage(place).free
        if free < NEEDED:
            return (
                f"{place} has only {free >> 20} MiB free; expected {NEEDED >> 20}: free some, or"
                " choose another place by XDG_CACHE_HOME and TMPDIR"
            )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "error" in line] or lines
    text = errors[0][:300] if errors else f"exit code {code}"
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return f"it was killed (is there enough memory?): {text}" if killed else text
