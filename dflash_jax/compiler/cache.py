"""Compiled programs on disk, between processes."""

import contextlib
import functools
import logging
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("dflash_jax")
DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '(.*?)'")
FRESH = 60.0  # seconds in which another process may still be writing it


def enable_compilation_cache(directory: Path) -> None:
    """Keeps compiled programs on disk between processes; for entry points, never at import.

    Does nothing if the user already chose a directory. The folder is made private, because
    what it holds is executed. What a full disk or a killed process left there half-written is
    removed when it is met: JAX warns of it in every process, and never writes it anew.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.filterwarnings("always", DAMAGED.pattern)  # every one is acted upon
    warnings.showwarning = functools.partial(_show, directory, warnings.showwarning)


def _show(
    directory: Path, show: Callable[..., None], message: Any, *rest: Any, **more: Any
) -> None:
    """Shows a warning as before, unless it is of a damaged program, which is removed."""
    found = DAMAGED.match(str(message))
    if not found:
        return show(message, *rest, **more)
    log.info("%s", message)
    for entry in directory.glob(f"{found[1]}-*"):
        with contextlib.suppress(OSError):  # gone already, or not ours to remove
            if time.time() - entry.stat().st_mtime > FRESH and not _readable(entry):
                entry.unlink()
                log.warning("%s was damaged, and is compiled anew", entry)


def _readable(entry: Path) -> bool:
    """Whether a file of the cache can be unpacked."""
    try:
        from jax._src.compilation_cache import decompress_executable  # nothing public says it

        decompress_executable(entry.read_bytes())
    except Exception:  # zlib's and zstandard's own, which have no common name
        return False
    return True
