"""Memory in huge pages, from which a processor reads weights faster."""

import math
import mmap
import threading
from typing import Any

import numpy as np

_CHUNK = 1 << 25  # bytes that are asked of the kernel at a time
_HUGE = 1 << 21  # bytes of a huge page
_ALIGNMENT = 64  # bytes; JAX uses such arrays in place
_lock = threading.Lock()
_rest: list[np.ndarray] = []  # the unused end of the last chunk


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros in huge pages, if the kernel has any, that JAX can use in place.

    Memory returns to the kernel when no array of a chunk is left.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return _take(size).view(dtype).reshape(shape)


def _take(size: int) -> np.ndarray:
    """Return bytes, which are zero."""
    whole = -(-size // _ALIGNMENT) * _ALIGNMENT
    if whole > _CHUNK // 4:
        return _mapped(whole)[:size]
    with _lock:
        if not _rest or len(_rest[0]) < whole:
            _rest[:] = [_mapped(_CHUNK)]
        taken, _rest[0] = _rest[0][:whole], _rest[0][whole:]
        return taken[:size]


def _mapped(size: int) -> np.ndarray:
    """Return new memory that begins with a huge page.

    It is private: Linux gives shared memory, the default of `mmap`, huge pages only if it was told
    to (shmem_enabled).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    return found[-found.ctypes.data % _HUGE :][:size]
