"""Memory of the process: what malloc keeps, and how often Python looks for garbage.

`tune_allocator` keeps glibc from handing big temporaries back to the kernel after every step.

XLA on a CPU allocates scratch memory per call; with glibc's defaults each call page-faults it
anew, which costs up to 7x on bf16 products. Threads keep arenas of their own: in a single one
every call would search the tens of thousands of holes that compiling leaves, for half of the time
a call takes. Their heaps would go back whole whenever they are empty, but for a padding as large.
Other systems need nothing.
"""

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_HEAP = 1 << 26  # bytes of a heap, of which the arenas of threads are made
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _HEAP))
_RELEASED = 2**20  # bytes; smaller free ends stay
_tuned: list[bool] = []  # whether it was possible, each time
_RARE = (100_000, 50, 100)  # thresholds of Python's garbage collector
_raised: list[tuple[int, int, int]] = []  # the thresholds before, once per block that is running
_raising = threading.Lock()


def tune_allocator() -> bool:
    """Makes malloc keep freed memory; True if this process runs on glibc and took it."""
    libc = _glibc()
    if libc is None:
        return False
    _tuned.append(all([bool(libc.mallopt(*setting)) for setting in _SETTINGS]))
    return _tuned[-1]


def give_back(pools: Mapping[ThreadPoolExecutor, int] | None = None) -> None:
    """Hands what is free back to the kernel, once: compiling leaves hundreds of megabytes.

    `malloc_trim` leaves the free end of a thread's heap, up to 64 MB, which only a `free` in that
    heap releases, and only below the thresholds that `tune_allocator` raised.

    Args:
      pools: pools whose threads release theirs, and the number of their threads.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    if not (any(_tuned) and pools):
        return
    libc.mallopt(_M_TRIM_THRESHOLD, _RELEASED)
    libc.mallopt(_M_TOP_PAD, 0)
    try:
        tasks = [pool.submit(_release, libc) for pool, count in pools.items() for _ in range(count)]
        wait(tasks, timeout=1.0)  # what is busy for longer keeps its heap this time
    finally:
        for setting in _SETTINGS:
            libc.mallopt(*setting)


def _release(libc: ctypes.CDLL) -> None:
    """Release the free end of this thread's heap, and leave the next task to another thread."""
    libc.free(libc.malloc(_RELEASED // 2))
    time.sleep(0.001)


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Have Python's garbage collector run rarely while the block runs.

    Importing JAX and tracing programs make millions of objects that stay: looking through them
    takes a tenth of the time, and finds nothing. Blocks may overlap, in several threads too.
    """
    with _raising:
        before = _raised[0] if _raised else gc.get_threshold()
        _raised.append(before)
        gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        with _raising:
            _raised.pop()
            if not _raised:
                gc.set_threshold(*before)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None
