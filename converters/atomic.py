"""Output that appears whole or not at all: written beside its place, then renamed."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_jax.errors import CheckpointError


@contextlib.contextmanager
def new_path(path: Path, *, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yields a temporary path to write a file or folder at; it becomes `path` at the end.

    Nothing is left behind on failure. Raises CheckpointError if `path` exists and may not be
    overwritten, if fewer than `needed` bytes are free, or if the disk fills up.
    """
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists; choose another place or give --overwrite")
    parent = path.resolve().parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is not a folder; create it first")
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{path} needs {needed / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free;"
            " free some space or choose another place"
        )
    temporary = parent / f".{path.name}.partial-{os.getpid()}"
    try:
        yield temporary
        _swap(temporary, path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        _remove(temporary)


def _swap(temporary: Path, path: Path) -> None:
    if not os.path.lexists(path):
        temporary.rename(path)
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _explained(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"the disk is full; nothing was left at {path}: free some space")
    return CheckpointError(f"{path} cannot be written ({error.strerror}); check the place")
