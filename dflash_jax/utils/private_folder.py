"""Folders of caches, whose files are loaded or executed: private to the user, or not used.

A folder is safe if it and every folder on the way to it belong to the user or to root and nobody
else may write there. On the way, folders such as /tmp are safe, too: their sticky bit lets nobody
rename what belongs to another. Links are followed once, and what they lead to is checked.
"""

import atexit
import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_jax.utils import atomic

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
POLL = 0.1  # seconds between two attempts to lock a folder
LOCK = ".lock"
NOBODY = 65534  # the owner that Linux shows for users who have no number in a container
# Opening a pipe must not wait for a writer, and links are refused: neither was written here.
SAFELY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_said: set[str] = set()  # warnings that were written, each of them once


class UnsafeFolderError(PermissionError):
    """Another user could change a folder or a file of a cache."""


def prepare(folder: Path) -> Path:
    """Create a folder if it is missing, readable by the user only; return it without links.

    Raises:
      UnsafeFolderError: another user could change its contents.
      OSError: it cannot be created.
    """
    folder = Path(os.path.realpath(folder))
    if not hasattr(os, "geteuid"):  # access is not a matter of modes on Windows
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for place in reversed(folder.parents):
        _check(place, on_the_way=True)
    _check(folder, on_the_way=False)
    return folder


def cache_folder(folder: Path, name: str, warn: Callable[[str], None]) -> Path:
    """Return a private folder for a cache: `folder`, or another one if that is not safe.

    Args:
      folder: created if it is missing.
      name: name of the cache, and of its folder among temporary files.
      warn: called with the reason, once in a process.

    Raises:
      OSError: no private folder can be created.
    """
    try:
        return prepare(folder)
    except UnsafeFolderError as error:
        other = _of_this_user() / name
        text = f"{error}; {other} is used instead of {folder}"
        if text not in _said:
            _said.add(text)
            warn(text)
        return prepare(other)


@functools.cache
def _of_this_user() -> Path:
    """Return a private folder among temporary files; a new one if another user took its name."""
    folder = Path(tempfile.gettempdir()) / f"dflash_jax-{os.geteuid()}"
    try:
        if folder.is_symlink():  # to where its owner likes, who need not be this user
            raise UnsafeFolderError(f"{folder} is a link")
        return prepare(folder)
    except UnsafeFolderError:
        made = tempfile.mkdtemp(prefix="dflash_jax-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return prepare(Path(made))


def _check(path: Path, *, on_the_way: bool) -> None:
    """Make a folder if it is missing; raise an error unless it is safe, or so on the way to one."""
    status = _status_or_made(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not (on_the_way and status.st_uid == NOBODY and _nobody_is_unknown()):
        _check_owner(path, status)
    if not (on_the_way and status.st_mode & stat.S_ISVTX) and _others_may_write(status):
        raise UnsafeFolderError(
            f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o}); expected a folder"
            " that only its owner can change, as after chmod go-w"
        )


def _status_or_made(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir(mode=0o700)
        return path.lstat()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolderError(
            f"{path} belongs to user {status.st_uid}; expected {os.geteuid()} or root"
        )


@functools.cache
def _nobody_is_unknown() -> bool:
    """Return whether `NOBODY` stands for the users outside a container, root among them."""
    try:
        lines = Path("/proc/self/uid_map").read_text("utf-8").splitlines()
        ranges = [tuple(map(int, line.split())) for line in lines]
    except (OSError, ValueError):
        return False
    return not any(first <= NOBODY < first + count for first, _, count in ranges)


def _others_may_write(status: os.stat_result) -> bool:
    """Return whether others than the owner may write; the owner's own group may."""
    mode = status.st_mode & OTHERS_WRITE
    if mode == stat.S_IWGRP:
        return _is_shared(status.st_uid, status.st_gid)
    return bool(mode)


def _is_shared(user: int, group: int) -> bool:
    """Return whether a group is not the user's own: of the same name, without other members."""
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(user).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return True
    return owner != entry.gr_name or bool(set(entry.gr_mem) - {owner})


# -- files ----------------------------------------------------------------------------------------


def open_file(path: Path) -> int:
    """Open a file for reading; return its descriptor.

    Raises:
      UnsafeFolderError: another user could change it.
      OSError: it cannot be read, or is a link or a folder.
    """
    descriptor = os.open(path, SAFELY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        if hasattr(os, "geteuid"):
            _check_owner(path, status)
            if _others_may_write(status):
                raise UnsafeFolderError(f"others may write to {path}")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path) -> bytes:
    """Return the contents of a file.

    Raises:
      OSError: see `open_file`.
    """
    with open(open_file(path), "rb") as file:
        return file.read()


@contextlib.contextmanager
def locked(folder: Path, *, patience: float) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process at the latest.

    On file systems without locks, the block runs without one.

    Args:
      patience: seconds to wait for another process.

    Raises:
      TimeoutError: another process holds it for longer.
      OSError: the folder cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(folder / LOCK, flags, 0o600)
    try:
        end = time.monotonic() + patience
        while atomic.lock(descriptor) is False:
            if time.monotonic() > end:
                raise TimeoutError(f"another process has locked {folder} for {patience:.0f} s")
            time.sleep(POLL)
        yield
    finally:
        os.close(descriptor)
