"""The worker of llama.cpp that drafts, made of llama_worker.cpp and a build of llama.cpp."""

import hashlib
import os
import re
import subprocess
from pathlib import Path

from benchmarks.llama_cpp.worker import WorkerError

SOURCE = Path(__file__).parent / "llama_worker.cpp"
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
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", settings.read_text("utf-8"), re.M)
    libraries = [folder / name for name in LIBRARIES]
    if missing := [str(path) for path in libraries if not path.is_file()]:
        raise fail(f"it has no {missing[0]}")
    source = Path(home[1]) if home else folder
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
