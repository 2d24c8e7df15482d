"""Files that caches keep between processes, each with a digest, written whole or not at all.

A digest of a file's key and contents shows accidents: other contents under a key, as a full disk or
a killed process leaves them. It is no protection: a user who can write into a folder can also write
a digest, so the folder must be private.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import threading
from pathlib import Path

from dflash_jax.utils import private_folder
from dflash_jax.utils.progress import NO

log = logging.getLogger("dflash_jax.cache")
ENVIRONMENT = "DFLASH_COMPILATION_CACHE"  # "off" keeps nothing
MAGIC = b"dflash_jax entry 1\n"
START = len(MAGIC) + hashlib.sha256().digest_size  # of the contents
BETWEEN = 100  # files that this process writes between two looks at all of them
_written = itertools.count()  # files


def with_digest(key: str, contents: bytes) -> bytes:
    """Return the contents of an entry after a digest of them and of its key."""
    return _header(key, contents) + contents


def checked_contents(key: str, data: bytes) -> bytes | None:
    """Return the contents of an entry made by `with_digest`; None if they or the key differ."""
    contents = data[START:]
    return contents if data[:START] == _header(key, contents) else None


def _header(key: str, contents: bytes) -> bytes:
    return MAGIC + hashlib.sha256(key.encode() + b"\0" + contents).digest()


def default_folder(name: str = "xla") -> Path:
    """Return the default folder of a cache; `xla` is that of compiled programs.

    Raises:
      RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax" / name


class KeptFiles:
    """The files of a private folder by their keys.

    Args:
      most_bytes: of the folder; the files used least recently are removed.
      ending: of the files' names.
    """

    def __init__(self, folder: Path, most_bytes: int, ending: str = ""):
        self._folder, self._most_bytes, self._ending = folder, most_bytes, ending

    def path(self, key: str) -> Path:
        """Return the path of a file."""
        return self._folder / f"{key}{self._ending}"

    def read(self, key: str) -> bytes | None:
        """Return the contents of a file; None if there is none, or it is removed as damaged."""
        path = self.path(key)
        try:
            data = private_folder.read_file(path)
            os.utime(path)
        except OSError:
            return None
        contents = checked_contents(key, data)
        if contents is None:
            path.unlink(missing_ok=True)
            log.warning("%s was damaged, and is made again", path)
        return contents

    def write(self, key: str, contents: bytes) -> bool:
        """Write a file; return whether the folder took it."""
        path = self.path(key)
        made = path.with_name(f"{key}.{os.getpid()}-{threading.get_ident()}")
        try:
            made.write_bytes(with_digest(key, contents))
            made.replace(path)
            if next(_written) % BETWEEN == 0:
                self._remove_oldest()
        except OSError as error:
            log.info("%s is not kept: %s", path, error)
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove a file."""
        self.path(key).unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        """Remove the files used least recently, among them those that killed writers left."""
        files = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, entry.path, status.st_size))
        size = 0
        for _, path, size_of_file in sorted(files, reverse=True):
            size += size_of_file
            if size > self._most_bytes:
                Path(path).unlink(missing_ok=True)


def kept_by_default(name: str, most_bytes: int) -> KeptFiles | None:
    """Return the files of a default folder; None if nothing is to be kept, or it is not private."""
    if os.environ.get(ENVIRONMENT, "").strip().lower() in NO:
        return None
    try:
        return KeptFiles(private_folder.prepare(default_folder(name)), most_bytes)
    except (OSError, RuntimeError):  # the latter for a user without a home
        return None
