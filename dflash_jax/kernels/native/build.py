"""The native kernels of this process: shipped, on disk or compiled, and registered with JAX.

Compiled libraries are kept in a private folder. Their names end with the digest of their contents,
which is checked before they are loaded: code that is cut off would end the process.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import re
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

from dflash_jax.errors import NativeError
from dflash_jax.kernels.native import compiling, shipped
from dflash_jax.kernels.native.compiling import LEVELS, Level, find_compiler
from dflash_jax.quant.formats import KINDS
from dflash_jax.utils import atomic, private_folder
from dflash_jax.utils.processor import features
from dflash_jax.utils.progress import NO, YES, announced, is_shown

log = logging.getLogger("dflash_jax.kernels.native")
ENVIRONMENT = "DFLASH_NATIVE"  # "off", "amx", a level, or a folder for compiled libraries
AMX = "amx"  # the best level, with products by tiles
# Why products do without tiles, by the numbers that amx.h has for it.
NO_TILES = (
    "",
    "the kernels were compiled without it",
    "the processor has none",
    "the operating system does not enable it",
    "the operating system does not permit it to this process",
)
GROUPED = tuple(name.lower() for name, kind in KINDS.items() if kind.group)
PRODUCTS = ("float", "int8", "int8_by_floats", *GROUPED)
OF_EXPERTS = ("experts_float", *(f"experts_{name}" for name in GROUPED))
LAYERS = ("attend", "norm", "heads", "gate", "softcap", "route", "write", "write_int8")
NAMES = (*PRODUCTS, *OF_EXPERTS, *LAYERS, "largest", "filter", "draw")  # handlers, each dflash_NAME
WAIT = compiling.PATIENCE + 30  # seconds to wait for a process that compiles
# "SOURCES-COMPILER-CONTENTS.so", the digests of three things.
LIBRARY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-([0-9a-f]{64})\.so")
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Library:
    """The native kernels of this process.

    Attributes:
      path: the compiled library; None if there is none.
      reason: why there is none.
      level: the name of the features that it was compiled for.
      digest: digest of its contents.
      no_amx: why products do without AMX; "" if many rows are multiplied by its tiles. Results have
        the same bits.
    """

    path: Path | None
    reason: str = ""
    level: str = ""
    digest: str = ""
    no_amx: str = ""

    def __bool__(self) -> bool:
        return self.path is not None


def library() -> Library:
    """Return the native kernels, registered with JAX; compile them if that has to be.

    A library of the wheel is taken if there is one for this processor and JAX.
    """
    with _lock:
        return _library()


@functools.cache
def _library() -> Library:
    if os.environ.get(ENVIRONMENT, "").strip().lower() in NO:
        return Library(None, f"{ENVIRONMENT} is off")
    levels = usable_levels()
    if not levels:
        missing = LEVELS[-1].needs - features()
        return Library(None, f"the processor has no {', '.join(sorted(missing))}")
    try:
        if shipped_library := shipped.find(levels):
            level, path, contents = shipped_library
            without = _register(path)
            return Library(path, level=level.name, digest=contents, no_amx=without)
    except NativeError as error:
        log.warning("%s", error)
    try:
        path = build(levels[0], shown=is_shown())
        without = _register(path)
    except NativeError as error:
        return Library(None, str(error))
    contents = path.stem.rpartition("-")[2]
    return Library(path, level=levels[0].name, digest=contents, no_amx=without)


def usable_levels() -> list[Level]:
    """Return the levels of this processor, the best first, up to the one of `DFLASH_NATIVE`."""
    names = [level.name for level in LEVELS]
    first = names.index(_setting().lower()) if _setting().lower() in names else 0
    return [level for level in LEVELS[first:] if level.needs <= features()]


def _setting() -> str:
    return os.environ.get(ENVIRONMENT, "").strip()


def choose_amx(path: Path) -> str:
    """Turn products by AMX on unless `DFLASH_NATIVE` names a level; return why they are off."""
    if _setting().lower() not in (level.name for level in LEVELS):
        return use_amx(path)
    use_amx(path, wanted=False)
    return f"{ENVIRONMENT} is {_setting()}"


def use_amx(path: Path, *, wanted: bool = True) -> str:
    """Turn products by tiles of AMX on, if that is possible, or off; return why they are off."""
    if not wanted:
        ctypes.CDLL(str(path)).dflash_use_tiles(0)
        return "it was turned off"
    return NO_TILES[ctypes.CDLL(str(path)).dflash_use_tiles(1)]


def _register(path: Path) -> str:
    """Load a library and register its handlers with JAX; return why products do without AMX.

    Raises:
      NativeError: it cannot be loaded, or is not for this version of JAX.
    """
    try:
        loaded = ctypes.CDLL(str(path))
        functions = {f"dflash_{name}": getattr(loaded, f"dflash_{name}") for name in NAMES}
        for name, function in functions.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
        return choose_amx(path)
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        text = str(error).partition("\n")[0][:300]
        raise NativeError(f"the native kernels {path} cannot be loaded: {text}") from error


def build(level: Level, *, shown: bool = True) -> Path:
    """Return the compiled library of a level, compiling it if it is not on disk yet.

    Of processes that need it at the same time, one compiles and the others wait.

    Args:
      shown: whether to say on standard error that it is compiled.

    Raises:
      NativeError: there is no compiler, it fails, or another process compiles for too long.
    """
    source = _source_key(level)
    try:
        folder = private_folder.cache_folder(_folder(), "native", log.warning)
    except OSError as error:
        raise _not_written(_folder(), error) from error
    try:
        compiler = find_compiler()
    except NativeError:  # as in a container, whose image has the library alone
        if existing := _find(folder, f"{source}-*"):
            return existing
        raise
    key = f"{source}-{compiling.digest([*compiler, compiling.version_of(compiler)])}"
    if existing := _find(folder, f"{key}-*"):
        return existing
    waiting = "dflash_jax: waiting for another process, which compiles the native kernels"
    compiling_once = "dflash_jax: compiling the native kernels, once"
    try:
        with contextlib.ExitStack() as lock:
            with announced(waiting, shown=shown):
                lock.enter_context(private_folder.locked(folder, patience=WAIT))
            if existing := _find(folder, f"{key}-*"):
                return existing
            with announced(compiling_once, shown=shown, patience=0):
                return _compiled(compiler, level, folder, key)
    except TimeoutError as error:
        raise NativeError(
            f"another process compiles the native kernels ({error}); end it, or set {ENVIRONMENT}"
            " to another folder"
        ) from error
    except OSError as error:
        raise _not_written(folder, error) from error


def _compiled(compiler: Sequence[str], level: Level, folder: Path, key: str) -> Path:
    """Compile a library into a folder that is locked."""
    for left in folder.glob(f"{compiling.WORKING}*"):  # by a process that was killed
        atomic.remove(left)
    with compiling.working_folder(folder) as working:
        made = compiling.compile_library(compiler, level, working)
        contents = hashlib.sha256(made.read_bytes()).hexdigest()
        path = folder / f"{key}-{contents}.so"
        made.chmod(0o600)
        made.replace(path)
    return path


def _not_written(folder: Path, error: OSError) -> NativeError:
    return NativeError(
        f"the native kernels cannot be written to {folder} ({error}); set {ENVIRONMENT} to a folder"
        " that can be"
    )


def _find(folder: Path, pattern: str) -> Path | None:
    """Return a library of a folder whose contents are those that were written; remove others."""
    for path in sorted(folder.glob(f"{pattern}.so")):
        named = LIBRARY.fullmatch(path.name)
        try:
            contents = hashlib.sha256(private_folder.read_file(path)).hexdigest()
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:
            contents = ""
            text = str(error)
        else:
            text = f"{path} is damaged"
        if named and contents == named[1]:
            return path
        atomic.remove(path)
        log.warning("%s; the native kernels are compiled again", text)
    return None


def _source_key(level: Level) -> str:
    """Return a digest of everything but the compiler that the compiled library depends on."""
    parts = [*compiling.source_texts(), *level.flags]
    return compiling.digest([*parts, jaxlib.__version__, sysconfig.get_platform()])


def _folder() -> Path:
    """Return the folder of compiled libraries.

    Raises:
      NativeError: it is not given, and there is no home directory.
    """
    setting = _setting()
    if setting.lower() not in ("", AMX, *YES, *(level.name for level in LEVELS)):
        return Path(setting).expanduser().absolute()
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise NativeError(
            f"{error} Set {ENVIRONMENT} to a folder for the native kernels"
        ) from error
    return home / "dflash_jax" / "native"
