"""JAX's compilation cache: compiled programs on disk, shared between processes."""

import contextlib
import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dflash_jax.utils import private_folder
from dflash_jax.utils.kept_files import (
    ENVIRONMENT,
    MAGIC,
    checked_contents,
    default_folder,
    with_digest,
)
from dflash_jax.utils.progress import NO, YES

# Entries of JAX's compilation cache with a digest, so that damaged ones are compiled again.
#
# JAX loads and executes whatever a file under a program's key holds: another program, or, without
# a checksum of the compression, a program in which a bit has changed.


log = logging.getLogger("dflash_jax")
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
        contents = checked_contents(key, data)
        if contents is not None:
            return contents
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
        self._inner.put(key, with_digest(key, value))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of JAX's cache."""
        return getattr(self._inner, name)


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


ENTRY = re.compile(r".+-[0-9a-f]{64}-(cache|atime)")  # names of JAX's files
# Seconds of compiling from which a program is kept. Programs of an engine take longer; short
# operations of other code in the same process would only fill the folder.
WORTH_KEEPING = 0.1

CompilationCache = bool | str | os.PathLike[str] | None


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # at the caller of `load`


def use_compilation_cache(
    chosen: CompilationCache = None, *, warn: Callable[[str], None] = _warn
) -> Path | None:
    """Keep compiled programs on disk between processes.

    Called on loading, never on import. A folder and thresholds that JAX already has are not
    changed. A folder that cannot be written causes a warning only; one that another user could
    change is replaced by a private one, with a warning.

    Args:
      chosen: a folder; True for the default one, `dflash_jax/xla` in `XDG_CACHE_HOME` or
        `~/.cache`; False for none; None for the value of `DFLASH_COMPILATION_CACHE`, "off" or a
        folder, and the default folder if that is not set.
      warn: called with the warning.

    Returns:
      The folder that JAX uses from now on, or None.
    """
    if chosen is None:
        value = os.environ.get(ENVIRONMENT, "").strip()
        known = dict.fromkeys(("", *YES), True) | dict.fromkeys(NO, False)
        chosen = known.get(value.lower(), value)
    given = jax.config.values["jax_compilation_cache_dir"]
    if given or chosen is False:
        return Path(given) if given else None
    try:
        folder = default_folder() if chosen is True else Path(chosen).expanduser().absolute()
        folder = private_folder.cache_folder(folder, "xla", warn)
        enable_compilation_cache(folder)
    except (OSError, RuntimeError) as error:  # the latter for a user without a home
        warn(
            f"compiled programs are not kept between processes ({error}); set {ENVIRONMENT} to a"
            " folder that can be written, or to off"
        )
        return None
    return folder


def enable_compilation_cache(directory: Path) -> None:
    """Set JAX's compilation cache to a folder, unless it already has one.

    The folder is private to the user, because its contents are executed. Entries that are links, or
    that another user could have written, are removed at once. Damaged ones, as left by a full disk
    or a killed process, and those of other programs are removed when they are read: JAX never
    replaces them, and would execute some.

    Raises:
      UnsafeFolderError: another user could change the folder's contents.
      OSError: the folder cannot be created or written.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    directory = private_folder.prepare(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} cannot be written")
    for entry in private_folder.remove_unsafe(directory, ENTRY):
        log.warning("%s was a link, or another user's, and is compiled again", entry)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Other values than JAX's defaults were set by the user.
    if jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 1.0:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    if jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == 0:
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    check_entries(directory)
