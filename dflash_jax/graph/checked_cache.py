"""Entries of JAX's compilation cache with a digest, so that damaged ones are compiled again.

JAX loads and executes whatever a file under a program's key holds: another program, or, without
a checksum of the compression, a program in which a bit has changed. Each entry therefore begins
with a digest of its key and its contents. It shows accidents only: a user who can write into the
folder can also write a digest, so the folder must be private.
"""

import contextlib
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("dflash_jax")
MAGIC = b"dflash_jax entry 1\n"
START = len(MAGIC) + hashlib.sha256().digest_size  # of the contents
FRESH = 60.0  # seconds in which another process may still be writing a file


class CheckedCache:
    """A file cache of JAX that returns what was put under the same key, or nothing.

    Args:
      inner: JAX's cache.
      folder: of its files.
    """

    def __init__(self, inner: Any, folder: Path):
        self._inner, self._folder = inner, folder

    def get(self, key: str) -> bytes | None:
        """Return the contents of an entry; None if there is none, or it is removed as damaged."""
        data = self._inner.get(key)
        if data is None:
            return None
        if data[:START] == _header(key, data[START:]):
            return data[START:]
        entry = self._folder / f"{key}-cache"
        with contextlib.suppress(OSError):  # removed already, or without permission
            if time.time() - entry.lstat().st_mtime > FRESH:
                entry.unlink()
                # Earlier versions of this package wrote entries without a digest.
                level = logging.WARNING if data.startswith(MAGIC) else logging.INFO
                log.log(level, "%s was damaged, and is compiled again", entry)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Add an entry, unless there is one."""
        self._inner.put(key, _header(key, value) + value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of JAX's cache."""
        return getattr(self._inner, name)


def _header(key: str, contents: bytes) -> bytes:
    return MAGIC + hashlib.sha256(key.encode() + b"\0" + contents).digest()


def check_entries(folder: Path) -> None:
    """Let JAX check its entries in a folder, from now on in this process."""
    from jax._src import compilation_cache  # no public name

    make = compilation_cache.get_file_cache

    def checked(path: str) -> Any:
        found = make(path)
        if found is None or Path(found[1]) != folder:
            return found
        return CheckedCache(found[0], folder), found[1]

    compilation_cache.get_file_cache = checked
