"""Atomic writing of files and folders, by way of hidden temporary ones: `.NAME.partial-PID-RANDOM`.

    .NAME.partial-PID-RANDOM/new   the new content, renamed to NAME at the end
    .NAME.partial-PID-RANDOM/old   the previous content of NAME

The writer locks the folder. An unlocked folder belongs to a process that was killed.
"""

import contextlib
import ctypes
import errno
import hashlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_jax.errors import CheckpointError
from dflash_jax.utils.command import uninterrupted

try:
    import fcntl
    import resource
except ImportError:  # no such system runs JAX on more than a CPU
    fcntl = None
    resource = None

MANIFEST = "checkpoint.json"  # file of our own checkpoints
MODEL_FILES = (MANIFEST, "config.json")  # a folder with a model has one of them
NEW = "new"
OLD = "old"
ONE_FILE = 1 << 31  # bytes up to which every layout of weights has them in one file
LONGEST = 40  # characters of NAME in the name of its folder
EXCHANGE = 2  # RENAME_EXCHANGE of Linux
HERE = -100  # AT_FDCWD of Linux


def copy_companions(companions: Mapping[str, str | Path], place: Path) -> None:
    """Copy paths and write texts into a folder, by file name."""
    for name, content in companions.items():
        (place / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, place / name)
        else:
            (place / name).write_text(content, encoding="utf-8")


@contextlib.contextmanager
def new_path(path: Path, *, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which becomes `path` when the block succeeds.

    Links are followed. A failure leaves nothing, and concurrent writers are safe. If the process
    is killed, or the power fails, `path` is either unchanged or complete, and the next writer of
    the same path removes the hidden temporary folder.

    Args:
      overwrite: replace an existing file or model folder.
      needed: bytes that must be free.

    Raises:
      CheckpointError: `path` exists and may not be overwritten, or is a folder without a model; it
        is no usable name; fewer than `needed` bytes are free, or allowed in a file; the disk fills
        up.
    """
    try:
        with uninterrupted():
            clear(Path(os.path.realpath(path)))
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
    limit = _longest_file()
    if limit < min(needed, ONE_FILE):
        raise CheckpointError(
            f"{path} needs {needed / 1e6:,.1f} MB and this process may write files of at most"
            f" {limit / 1e6:,.1f} MB; raise the limit (ulimit -f)"
        )
    temporary: list[Partial] = []
    try:
        with uninterrupted():
            temporary.append(Partial(place))
        yield temporary[0].content
        flush(temporary[0].content)
        with uninterrupted():
            temporary[0].publish(replaces=overwrite)
        flush_folder(parent)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        with uninterrupted():
            for each in temporary:
                remove(each.folder)
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


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file, or a link but not its target; ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _longest_file() -> float:
    """Return the most bytes that this process may write into a file."""
    if resource is None:
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _explained(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"the disk is full; nothing was left at {path}: free some space")
    if error.errno == errno.EFBIG:
        return CheckpointError(
            f"{path} needs a larger file than may be written there, and nothing was left; raise the"
            " limit (ulimit -f), or choose another file system"
        )
    return CheckpointError(f"{path} cannot be written ({error.strerror or error}); check the place")


class Partial:
    """A locked temporary folder.

    Args:
      place: the final path of the content.

    Raises:
      OSError: the folder cannot be made.
    """

    def __init__(self, place: Path):
        self._place = place
        self._lock = -1
        while True:
            own = f"{os.getpid()}-{secrets.token_hex(4)}"
            self.folder = place.parent / f".{_stem(place)}.partial-{own}"
            self.folder.mkdir()
            self._lock = os.open(self.folder, os.O_RDONLY)
            if lock(self._lock) is not False and _is_at(self._lock, self.folder):
                return
            self.release()  # another process considered it abandoned and removed it

    @property
    def content(self) -> Path:
        """Return the path to write a file or folder at."""
        return self.folder / NEW

    def publish(self, *, replaces: bool) -> None:
        """Move the content to its final path; previous content moves into this folder.

        Args:
          replaces: whether the final path may exist.

        Raises:
          OSError: the content cannot be renamed, for example onto an existing folder.
        """
        old = self.folder / OLD
        if not replaces or not os.path.lexists(self._place):
            self.content.rename(self._place)
        elif _exchange(self.content, self._place):
            self.content.rename(old)
        else:
            self._place.rename(old)
            try:
                self.content.rename(self._place)
            except OSError:
                old.rename(self._place)
                raise

    def release(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def clear(place: Path) -> None:
    """Remove temporary folders of killed writers of `place`, restoring content they had moved.

    Folders of running processes, recognised by their lock or process id, are not touched.
    """
    pattern = re.compile(re.escape(f".{_stem(place)}.") + r"(partial|old)-(\d+)-[0-9a-f]+")
    try:
        folders = [(path, pattern.fullmatch(path.name)) for path in place.parent.iterdir()]
    except OSError:
        return
    for path, match in folders:
        if match:
            with contextlib.suppress(OSError):
                _clear_one(place, path, int(match[2]))


def _clear_one(place: Path, folder: Path, pid: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
    try:
        if lock(descriptor) is False or _may_run(pid, os.fstat(descriptor).st_mtime):
            return
        if (folder / OLD).exists() and not os.path.lexists(place):
            (folder / OLD).rename(place)
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.unlink()
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool | None:
    """Lock an open file or folder; False if it is locked, None if its file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the descriptor's folder still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _may_run(pid: int, written: float) -> bool:
    """Return whether the process with this id may have written a folder at this time (seconds).

    Process ids are reused: a process that started after the folder was written is another one.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's
    started = _started(pid)
    return started is None or started <= written + 1


def _started(pid: int) -> float | None:
    """Return the start time of a process in seconds since the epoch; None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        [boot] = re.findall(r"^btime (\d+)$", Path("/proc/stat").read_text("utf-8"), re.MULTILINE)
        return int(boot) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically; return False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


def flush(path: Path) -> None:
    """Flush a file, or a folder with its contents, to disk.

    Raises:
      OSError: the disk is full or fails.
    """
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            if not (file := Path(folder, name)).is_symlink():
                _sync(file)
        flush_folder(Path(folder))
    if not path.is_dir():
        _sync(path)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk, where the file system supports it."""
    with contextlib.suppress(OSError):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(place: Path) -> str:
    """Return a short unique name for a path within its folder."""
    if len(place.name) <= LONGEST:
        return place.name
    digest = hashlib.sha256(os.fsencode(place.name)).hexdigest()
    return f"{place.name[: LONGEST - 9]}-{digest[:8]}"
