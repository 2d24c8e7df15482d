"""Atomic writing of files and folders."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_jax.errors import CheckpointError
from dflash_jax.utils import partial
from dflash_jax.utils.command import uninterrupted

MANIFEST = "checkpoint.json"  # of our own checkpoints
MODEL_FILES = (MANIFEST, "config.json")  # a folder with a model has one of them


def copy_companions(companions: Mapping[str, str | Path], place: Path) -> None:
    """Copy paths and write texts into a folder, by file name."""
    for name, content in companions.items():
        (place / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, place / name)
        else:
            (place / name).write_text(content, encoding="utf-8")


@contextlib.contextmanager
def new_path(
    path: Path, *, overwrite: bool, needed: int = 0, durable: bool = True
) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which becomes `path` when the block succeeds.

    Links are followed. A failure leaves nothing, and concurrent writers are safe. If the process
    is killed, `path` is either unchanged or complete, and the next writer of the same path removes
    the hidden temporary folder.

    Args:
      overwrite: replace an existing file or model folder.
      needed: bytes that must be free.
      durable: flush the content to disk before it becomes `path`, so that it also survives a power
        failure. False also leaves folders of killed processes to the caller.

    Raises:
      CheckpointError: `path` exists and may not be overwritten, or is a folder without a model; it
        is no usable name; fewer than `needed` bytes are free, or the disk fills up.
    """
    try:
        if durable:
            with uninterrupted():
                partial.clear(Path(os.path.realpath(path)))
        place = _place(path, overwrite)
    except OSError as error:  # a name that is too long, a folder without permission
        raise _explained(error, path) from error
    parent = place.parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is not a folder; create it first")
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{path} needs {needed / 1e6:,.1f} MB and {parent} has {free / 1e6:,.1f} MB free;"
            " free some space or choose another place"
        )
    temporary: list[partial.Partial] = []
    try:
        with uninterrupted():
            temporary.append(partial.Partial(place))
        yield temporary[0].content
        if durable:
            partial.flush(temporary[0].content)
        with uninterrupted():
            temporary[0].publish(replaces=overwrite)
        if durable:
            partial.flush_folder(parent)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        with uninterrupted():
            for each in temporary:
                _remove(each.folder)
                each.release()


def _place(path: Path, overwrite: bool) -> Path:
    """Return the resolved path; raise CheckpointError if it cannot or should not be written."""
    if path.name in ("", ".."):
        raise CheckpointError(f"'{path}' has no file name; give one")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists; choose another place or give --overwrite")
    place = Path(os.path.realpath(path))
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise CheckpointError(f"{path} is neither a file nor a folder; choose another place")
    if os.path.ismount(place):
        raise CheckpointError(f"{path} is a mount point; choose a place below it")
    known = any((place / name).is_file() for name in MODEL_FILES)
    if place.is_dir() and not known and any(place.iterdir()):
        raise CheckpointError(
            f"{path} holds files but no {' or '.join(MODEL_FILES)}, so it is no model and is not"
            " overwritten; remove it or choose another place"
        )
    return place


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _explained(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"the disk is full; nothing was left at {path}: free some space")
    return CheckpointError(f"{path} cannot be written ({error.strerror}); check the place")
