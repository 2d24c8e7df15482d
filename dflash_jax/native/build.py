"""Compile the native kernels at first use, and register them with JAX."""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from dflash_jax.errors import NativeError
from dflash_jax.utils.processor import features, processor
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.switches import NO, YES

ENVIRONMENT = "DFLASH_NATIVE"  # "off", or a folder for the compiled library
HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cc")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
PRODUCTS = ("float", "int8", "int8_by_floats", "q8_0", "q4_0", "q4_1", "int4z", "q4_k", "q6_k")
NAMES = (*PRODUCTS, "attend", "norm", "rotate", "largest")  # of the handlers, each dflash_NAME
NEEDED = frozenset(["avx2", "fma", "f16c"])
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-ffp-contract=off")
FLAGS += ("-fno-math-errno", "-DNDEBUG")
PATIENCE = 300.0  # seconds after which compiling is given up
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Library:
    """The native kernels of this process.

    Attributes:
      path: the compiled library; None if there is none.
      reason: why there is none.
    """

    path: Path | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.path is not None


def library() -> Library:
    """Return the native kernels, compiled and registered with JAX if this machine can have them."""
    with _lock:
        return _library()


@functools.cache
def _library() -> Library:
    if os.environ.get(ENVIRONMENT, "").strip().lower() in NO:
        return Library(None, f"{ENVIRONMENT} is off")
    if missing := NEEDED - features():
        return Library(None, f"the processor has no {', '.join(sorted(missing))}")
    try:
        path = build(shown=is_shown())
        loaded = ctypes.CDLL(str(path))
        for name in NAMES:
            function = jax.ffi.pycapsule(getattr(loaded, f"dflash_{name}"))
            jax.ffi.register_ffi_target(f"dflash_{name}", function, platform="cpu")
    except (NativeError, OSError, AttributeError) as error:
        return Library(None, str(error))
    return Library(path)


def build(*, shown: bool = True) -> Path:
    """Return the compiled library of this machine, compiling it if it is not on disk yet.

    Args:
      shown: whether to say on standard error that it is compiled.

    Raises:
      NativeError: there is no compiler, or it fails.
    """
    source = _source_key()
    try:
        compiler = find_compiler()
    except NativeError:  # as in a container, whose image has the library alone
        if made := sorted(_folder().glob(f"{source}-*.so")):
            return made[0]
        raise
    path = _folder() / f"{source}-{_compiler_key(compiler)}.so"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(".so", dir=path.parent)
        os.close(descriptor)
    except OSError as error:
        raise NativeError(
            f"the native kernels cannot be written to {path.parent} ({error}); set {ENVIRONMENT}"
            " to a folder that can be"
        ) from error
    try:
        with announced("dflash_jax: compiling the native kernels, once", shown=shown, patience=0):
            _compile(compiler, Path(made))
        Path(made).replace(path)  # complete or absent, also for other processes
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _compile(compiler: tuple[str, ...], path: Path) -> None:
    """Compile each source in a process of its own, and link them."""
    including = [*compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), "-c"]
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        ThreadPoolExecutor(len(SOURCES)) as pool,
    ):
        objects = [str(Path(folder) / f"{source.stem}.o") for source in SOURCES]
        pairs = zip(SOURCES, objects, strict=True)
        commands = ([*including, str(source), "-o", made] for source, made in pairs)
        list(pool.map(_run, commands))
        _run([*compiler, *FLAGS, "-shared", *objects, "-o", str(path)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the native kernels could not be compiled: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise NativeError(f"{command[0]} cannot compile the native kernels: {lines[0][:300]}")


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C++ compiler: `CXX`, the system's, or that of the package ziglang.

    Raises:
      NativeError: there is none.
    """
    if given := os.environ.get("CXX", "").split():
        return tuple(given)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise NativeError(
        "there is no C++ compiler for the native kernels; install one, such as the system's g++, or"
        " pip install ziglang"
    )


def _source_key() -> str:
    """Return a digest of everything but the compiler that the compiled library depends on."""
    parts = [source.read_text(encoding="utf-8") for source in (*HEADERS, *SOURCES)]
    parts += [*FLAGS, processor(), jaxlib.__version__, sysconfig.get_platform()]
    return _digest(parts)


def _compiler_key(compiler: tuple[str, ...]) -> str:
    """Return a digest of a compiler's version."""
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the C++ compiler {compiler[0]} cannot be run: {error}") from error
    return _digest([version])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Return the folder of compiled libraries.

    Raises:
      NativeError: it is not given, and there is no home directory.
    """
    given = os.environ.get(ENVIRONMENT, "").strip()
    if given.lower() not in ("", *YES):
        return Path(given).expanduser().absolute()
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise NativeError(
            f"{error} Set {ENVIRONMENT} to a folder for the native kernels"
        ) from error
    return home / "dflash_jax" / "native"
