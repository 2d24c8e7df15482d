"""Caches on disk: files by key in a private folder, each complete or absent.

A digest of a file's key and contents shows accidents: other contents under a key, as a failing disk
leaves them. It is no protection: a user who can write into a folder can also write a digest, so the
folder must be private.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_jax.utils import atomic, private_folder
from dflash_jax.utils.progress import NO

log = logging.getLogger("dflash_jax.cache")
ENVIRONMENT = "DFLASH_COMPILATION_CACHE"  # "off" keeps nothing
MAGIC = b"dflash_jax entry 1\n"
KEPT_SHARE = 0.9  # share of the size that is left when the oldest files are removed


def default_folder(name: str = "xla") -> Path:
    """Return the default folder of a cache; `xla` is that of compiled programs.

    Raises:
      RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax" / name


class Store:
    """The files of a cache by key, which processes of one user may share. Losing one is no error.

    Args:
      folder: created if it is missing.
      ending: ending of the files' names; other files of the folder are left alone.
      size: most bytes of all files. Those used least recently are removed.

    Raises:
      UnsafeFolderError: another user could change what is in the folder.
      OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path, ending: str, *, size: int):
        self.folder = private_folder.prepare(folder)
        self._ending = ending
        self._size = size
        # Bytes written since this store last looked at all files, which the first write does.
        self._uncounted = size

    def __contains__(self, key: str) -> bool:
        """Return whether there is a file, whatever it holds."""
        return os.path.lexists(self._path(key))

    def get(self, key: str) -> bytes | None:
        """Return the contents of a file; None if there is none, or it is removed as damaged."""
        path = self._path(key)
        try:
            contents = self._checked(key, path)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, a pipe, a folder, or what another user could change
            log.warning("%s is made again: %s", path, error)
            atomic.remove(path)
            return None
        if contents is None:
            log.warning("%s was damaged, and is made again", path)
            atomic.remove(path)
            return None
        self.mark_used([key])
        return contents

    def put(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write the parts of a file, one after the other, in place of what was under the key.

        Raises:
          OSError: the folder cannot be written, or the disk is full.
        """
        partial = self.folder / f".{secrets.token_hex(8)}{self._ending}"
        digest = _digest(key)
        try:
            with open(partial, "xb", opener=_for_the_user) as file:
                file.write(MAGIC + digest.digest())  # replaced at the end
                for part in parts:
                    digest.update(part)
                    file.write(part)
                self._uncounted += file.tell()
                file.seek(len(MAGIC))
                file.write(digest.digest())
            partial.replace(self._path(key))
        finally:
            partial.unlink(missing_ok=True)
        if self._uncounted > self._size * (1 - KEPT_SHARE):
            self._uncounted = 0
            self._remove_oldest()

    def remove(self, key: str) -> None:
        """Remove a file, if there is one and the folder can be written."""
        atomic.remove(self._path(key))

    def mark_used(self, keys: Iterable[str]) -> None:
        """Mark files as used just now, the last one as the most recent."""
        now = time.time_ns()
        for at, key in enumerate(keys):
            with contextlib.suppress(OSError):  # another process removed it, or nothing is written
                os.utime(self._path(key), ns=(now, now + at), follow_symlinks=False)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all files."""
        for entry in self._entries():
            if not entry.name.startswith("."):
                yield entry.name.removesuffix(self._ending)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{self._ending}"

    def _checked(self, key: str, path: Path) -> bytes | None:
        """Return the contents of a file; None if they are not those that were written."""
        with os.fdopen(private_folder.open_file(path), "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            digest = _digest(key)
            expected = file.read(digest.digest_size)
            contents = file.read()
        digest.update(contents)
        return contents if digest.digest() == expected else None

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files of this store, among them those that killed writers left."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(self._ending) and not entry.is_dir(follow_symlinks=False):
                    yield entry

    def _remove_oldest(self) -> None:
        """Remove the files used least recently until there is room for some more."""
        files = []
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime_ns, status.st_size, entry.path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._size * KEPT_SHARE:
                Path(path).unlink(missing_ok=True)


def default_store(name: str, ending: str, *, size: int) -> Store | None:
    """Return the store of a default folder; None if nothing is to be kept, or it is not private."""
    if os.environ.get(ENVIRONMENT, "").strip().lower() in NO:
        return None
    try:
        return Store(default_folder(name), ending, size=size)
    except (OSError, RuntimeError):  # the latter for a user without a home
        return None


def _digest(key: str) -> "hashlib._Hash":
    return hashlib.sha256(key.encode() + b"\0")


def _for_the_user(path: str, flags: int) -> int:
    """Open a file that nobody else may read."""
    return os.open(path, flags, 0o600)
