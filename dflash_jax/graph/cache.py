"""JAX's compilation cache: compiled programs on disk, shared between processes."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dflash_jax.utils import private_folder
from dflash_jax.utils.progress import NO, YES
from dflash_jax.utils.store import ENVIRONMENT, Store, default_folder

ENDING = "-cache"  # ending of the names of JAX's files
MOST_BYTES = 2**33  # most bytes of the folder, unless JAX has another setting
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
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured or chosen is False:
        return Path(configured) if configured else None
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

    The folder is private to the user, because its contents are executed. JAX keeps its programs
    there in a `Store`: it would execute whatever a file under a program's key holds.

    Raises:
      UnsafeFolderError: another user could change the folder's contents.
      OSError: the folder cannot be created or written.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    most = jax.config.values["jax_compilation_cache_max_size"]
    store = Store(directory, ENDING, size=MOST_BYTES if most < 0 else most)
    if not os.access(store.folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{store.folder} cannot be written")
    jax.config.update("jax_compilation_cache_dir", str(store.folder))
    # Other values than JAX's defaults were set by the user.
    if jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 1.0:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    if jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == 0:
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _give_to_jax(store)


class StoredEntries:
    """A store as JAX calls its cache."""

    def __init__(self, store: Store):
        self._store = store
        self._path = store.folder  # JAX logs it

    def get(self, key: str) -> bytes | None:
        """Return the contents of an entry; None if there is none."""
        return self._store.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Add an entry.

        Raises:
          OSError: the folder cannot be written, or the disk is full.
        """
        self._store.put(key, [value])


def _give_to_jax(store: Store) -> None:
    """Let JAX use a store for the entries of its folder, from now on in this process."""
    from jax._src import compilation_cache  # no public name

    of_jax = compilation_cache.get_file_cache

    def file_cache(path: str) -> Any:
        return (StoredEntries(store), path) if Path(path) == store.folder else of_jax(path)

    compilation_cache.get_file_cache = file_cache
