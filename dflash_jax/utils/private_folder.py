"""Folders of caches, whose files are loaded or executed: private to the user, or not used.

A folder is safe if it and every folder on the way to it, links included, belong to the user or to
root and nobody else may write there. On the way, folders such as /tmp are safe, too: their sticky
bit lets nobody rename what belongs to another.
"""

import atexit
import contextlib
import errno
import functools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_jax.utils import atomic

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LINKS = 40  # most links on the way to a folder, as in Linux
POLL = 0.1  # seconds between two attempts to lock a folder
LOCK = ".lock"
NOBODY = 65534  # the owner that Linux shows for users who have no number in a container
# Opening a pipe must not wait for a writer, and links are refused: neither was written here.
SAFELY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_said: set[str] = set()  # warnings, each of which is given once


class UnsafeFolderError(PermissionError):
    """Another user could change a folder or a file of a cache."""


def prepare(folder: Path) -> Path:
    """Create a folder if it is missing, readable by the user only; return it without links.

    Raises:
      UnsafeFolderError: another user could change its contents.
      OSError: it cannot be created.
    """
    folder = folder.absolute()
    if not hasattr(os, "geteuid"):  # access is not a matter of modes on Windows
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    place, names, links = Path(folder.anchor), list(folder.parts[1:]), 0
    while names:
        _check(place, place.lstat(), on_the_way=True)
        name = names.pop(0)
        if name == os.pardir:
            place = place.parent
            continue
        found = _found_or_made(place / name)
        if not stat.S_ISLNK(found.st_mode):
            place /= name
            continue
        links += 1
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        _check_owner(place / name, found)
        target = (place / name).readlink()
        place = Path(target.anchor) if target.is_absolute() else place
        names[:0] = target.parts[1:] if target.is_absolute() else target.parts
    _check(place, place.lstat(), on_the_way=False)
    return place


def cache_folder(folder: Path, name: str, warn: Callable[[str], None]) -> Path:
    """Return a private folder for a cache: `folder`, or another one if that is not safe.

    Args:
      folder: created if it is missing.
      name: of the cache, which names the other folder.
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


def is_own(path: Path) -> bool:
    """Return whether a path is a folder of this user, and not a link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == getattr(os, "geteuid", int)()


@functools.cache
def _of_this_user() -> Path:
    """Return a private folder among temporary files; a new one if another user took its name."""
    try:
        return prepare(Path(tempfile.gettempdir()).absolute() / f"dflash_jax-{os.geteuid()}")
    except UnsafeFolderError:
        made = tempfile.mkdtemp(prefix="dflash_jax-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return prepare(Path(made).absolute())


def _found_or_made(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir(mode=0o700)
        return path.lstat()


def _check(path: Path, found: os.stat_result, *, on_the_way: bool) -> None:
    """Raise an error unless a folder, or one on the way to it, is safe."""
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not (on_the_way and found.st_uid == NOBODY and _nobody_is_unknown()):
        _check_owner(path, found)
    if not (on_the_way and found.st_mode & stat.S_ISVTX) and _others_may_write(path, found):
        raise UnsafeFolderError(
            f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):o}); expected a folder"
            " that only its owner can change, as after chmod go-w"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolderError(
            f"{path} belongs to user {found.st_uid}; expected {os.geteuid()} or root"
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


def _others_may_write(path: Path, found: os.stat_result) -> bool:
    """Return whether others than the owner may write; the owner's own group may."""
    mode = found.st_mode & OTHERS_WRITE
    if mode != stat.S_IWGRP:
        return bool(mode)
    with contextlib.suppress(OSError, AttributeError):  # it has no list of users who may write
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    return _is_shared(found.st_uid, found.st_gid)


def _is_shared(user: int, group: int) -> bool:
    """Return whether a group is not the user's own: of the same name, without other members."""
    import grp
    import pwd

    try:
        owner, entry = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
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
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        if hasattr(os, "geteuid"):
            _check_owner(path, found)
            if _others_may_write(path, found):
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


def publish(made: Path, path: Path) -> None:
    """Give a complete file its name, durably.

    Raises:
      OSError: it cannot be flushed or renamed.
    """
    made.chmod(0o600)
    atomic.flush(made)
    made.replace(path)
    atomic.flush_folder(path.parent)


def remove_unsafe(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Remove and return files of a private folder that another user could change, and links.

    Args:
      names: of the files that are looked at.
    """
    removed = []
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            try:
                os.close(open_file(path))
            except FileNotFoundError:  # another process was faster
                continue
            except OSError:
                atomic.remove(path)
                removed.append(path)
    return removed


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
