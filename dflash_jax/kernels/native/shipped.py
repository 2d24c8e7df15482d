"""The compiled kernels of a wheel: a library for each level, and a file that describes them.

compiled/about.json   the sources they were compiled from, and the digest of each library
compiled/avx2.so      one library for each level
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import NativeError
from dflash_jax.kernels.native import compiling
from dflash_jax.kernels.native.compiling import LEVELS, Level

FOLDER = compiling.HERE / "compiled"
ABOUT = "about.json"
# The parts of the C++ library that are used go into ours, which then needs glibc alone, and no
# newer version than these parts do.
LINKING = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")


def write(folder: Path, compiler: Sequence[str], levels: Sequence[Level] = LEVELS) -> list[Path]:
    """Compile libraries for a wheel into a folder; return the files of the wheel.

    Raises:
      NativeError: the compiler fails.
    """
    paths = []
    digests = {}
    for level in levels:
        with compiling.working_folder(folder) as working:
            made = compiling.compile_library(compiler, level, working, LINKING)
            paths.append(made.replace(folder / made.name))
        digests[level.name] = hashlib.sha256(paths[-1].read_bytes()).hexdigest()
    about = {"sources": compiling.digest(compiling.source_texts()), "libraries": digests}
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return [*paths, folder / ABOUT]


def find(levels: Sequence[Level]) -> tuple[Level, Path, str] | None:
    """Return the first of the levels that has a shipped library, its path and its digest.

    None if there is none, or if the sources are others: those of a checkout that was changed.

    Raises:
      NativeError: the files are damaged.
    """
    if not (FOLDER / ABOUT).is_file():
        return None
    try:
        about = json.loads((FOLDER / ABOUT).read_text(encoding="utf-8"))
        if about["sources"] != compiling.digest(compiling.source_texts()):
            return None
        for level in levels:
            if level.name in about["libraries"]:
                path = FOLDER / f"{level.name}.so"
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                if digest != about["libraries"][level.name]:
                    raise ValueError(f"{path} has another digest than {ABOUT} says")
                return level, path, digest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NativeError(
            f"the native kernels in {FOLDER} are damaged ({error}); reinstall dflash-jax"
        ) from error
    return None
