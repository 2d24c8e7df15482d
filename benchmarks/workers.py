"""Worker processes that load models once and answer requests: ours, and llama.cpp's."""

import contextlib
import hashlib
import json
import os
import re
import selectors
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).parent / "llama_worker.cpp"
# Bytecode is cached, as in an installation.
INHERITED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
PATIENCE = 900.0  # seconds for loading and compiling, and for an answer
LIBRARIES = (
    "common/libllama-common.a", "src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a",
    "ggml/src/libggml-base.a", "common/libllama-common-base.a",
    "vendor/cpp-httplib/libcpp-httplib.a",
)  # fmt: skip
HOW_TO_BUILD = """\
--llama-cpp is {folder}: {problem}. It is the folder in which llama.cpp was built, for example by
  pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
  tar xf llama_cpp_python-0.3.36.tar.gz
  cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B FOLDER -DCMAKE_BUILD_TYPE=Release \\
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \\
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_MTMD=OFF
  cmake --build FOLDER --config Release -j"""


class WorkerError(RuntimeError):
    """A worker cannot be built, or ended, or did not answer in time."""


def llama_worker(folder: Path, cache: Path) -> Path:
    """Return the program made of llama_worker.cpp and the libraries of a build of llama.cpp.

    Raises:
      WorkerError: the folder is no such build, or the program does not compile.
    """

    def fail(problem: str) -> WorkerError:
        return WorkerError(HOW_TO_BUILD.format(folder=folder, problem=problem))

    settings = folder / "CMakeCache.txt"
    if not settings.is_file():
        raise fail("it has no CMakeCache.txt")
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", settings.read_text("utf-8"), re.M)
    libraries = [folder / name for name in LIBRARIES]
    if missing := [str(path) for path in libraries if not path.is_file()]:
        raise fail(f"it has no {missing[0]}")
    source = Path(found[1]) if found else folder
    if not (source / "include" / "llama.h").is_file():
        raise fail(f"the source it was built from, {source}, is gone")
    key = hashlib.sha256(SOURCE.read_bytes())
    for path in libraries:
        key.update(f"{path} {path.stat().st_mtime_ns}".encode())
    program = cache / f"llama_worker-{key.hexdigest()[:16]}"
    if not program.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        made = program.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-DGGML_USE_CPU"]
        command += [f"-I{source / place}" for place in ("common", "vendor", "include")]
        command += [f"-I{source / 'ggml' / 'include'}", str(SOURCE), "-o", str(made)]
        command += [*map(str, libraries), "-fopenmp", "-lpthread", "-ldl", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise WorkerError(f"llama_worker.cpp does not compile:\n{done.stderr[-2000:]}")
        made.replace(program)
    return program


def llama_version(folder: Path) -> str:
    """Return what llama-bench of a build says of its version, or "unknown"."""
    program = folder / "bin" / "llama-bench"
    if not program.is_file():
        return "unknown"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return " ".join((done.stdout + done.stderr).split()) or "unknown"


class Worker:
    """A process pinned to cores, and the requests it answers one by one."""

    def __init__(
        self, command: Sequence[str], cores: int, *, environment: Mapping[str, str] | None = None
    ):
        """Start the process and wait until it has loaded its models.

        Args:
          cores: how many it may use; the first ones of this process.

        Raises:
          WorkerError: it ended instead.
        """
        chosen = sorted(os.sched_getaffinity(0))[:cores]
        if len(chosen) < cores:
            raise WorkerError(f"{cores} cores were asked for; this process has {len(chosen)}")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, chosen)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,  # `select` sees no lines that Python has read already
            cwd=ROOT,
            env=INHERITED | dict(environment or {}),
        )
        try:
            self.first = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
          WorkerError: the process ended, or does not answer.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._ended()) from error
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        """Return the next line that is an object; libraries may print others."""
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(PATIENCE):
                line = self._process.stdout.readline()
                if not line:
                    raise WorkerError(self._ended())
                if line.startswith(b"{"):
                    return json.loads(line)
        raise WorkerError(f"a worker did not answer in {PATIENCE:.0f} s")

    def _ended(self) -> str:
        code = self._process.wait(10)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return f"a worker ended with code {code}:\n{text[-2000:]}"
