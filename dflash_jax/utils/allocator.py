"""Memory of the process: malloc, Python's garbage collector, and huge pages.

XLA on a CPU allocates scratch memory in each call. With glibc's defaults, large temporaries return
to the kernel after every step and each call page-faults them again, which costs up to 7x on
bfloat16 products. `tune_allocator` makes malloc keep freed memory. Threads keep separate arenas: a
single one would be fragmented by compiling, and searching it would take half of the time of a
call. The top padding is as large as a thread's heap, so that empty heaps are kept.
"""

import contextlib
import ctypes
import gc
import math
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_HEAP = 1 << 26  # bytes of a heap in the arena of a thread
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _HEAP))
_RELEASED = 2**20  # bytes; smaller free ends are kept
_LEFT = 2**25  # bytes; ends that `release_freed` keeps, as faulting them in again takes time
_tuned: list[bool] = []  # result of each call of tune_allocator
_releasing: list[int] = []  # largest free end of a heap that is kept, by active block
_changing = threading.Lock()  # held while malloc's settings change
_RARE = (100_000, 50, 100)  # thresholds of Python's garbage collector
_raised: list[tuple[int, int, int]] = []  # original thresholds, one entry per active block
_raising = threading.Lock()


def tune_allocator() -> bool:
    """Make malloc keep freed memory; return whether the C library supports it."""
    libc = _glibc()
    if libc is None:
        return False
    with _changing:
        _tuned.append(all([bool(libc.mallopt(*setting)) for setting in _settings()]))
    return _tuned[-1]


@contextlib.contextmanager
def release_freed(kept: int = _LEFT) -> Iterator[None]:
    """Return freed memory to the kernel while the block runs, and what is free at its end.

    For work that leaves much less memory than it used, like loading: the heaps of its threads
    would keep all of it, also after the threads ended. Blocks may overlap, also across threads.

    Args:
      kept: bytes up to which a heap keeps its free end while the block runs.
    """
    libc = _glibc()
    if libc is None or not any(_tuned):
        yield
        return
    with _changing:
        _releasing.append(kept)
        _apply(libc)
    try:
        yield
    finally:
        with _changing:
            _releasing.remove(kept)
            _apply(libc)
        libc.malloc_trim(0)


def _settings() -> tuple[tuple[int, int], ...]:
    if not _releasing:
        return _SETTINGS
    return (*_SETTINGS, (_M_TRIM_THRESHOLD, min(_releasing)), (_M_TOP_PAD, 0))  # the last count


def _apply(libc: ctypes.CDLL) -> None:
    for setting in _settings():
        libc.mallopt(*setting)


def trim_memory(
    pools: Mapping[ThreadPoolExecutor, int] | None = None, timeout: float = 0.2
) -> None:
    """Return free memory to the kernel, such as the hundreds of megabytes left by compiling.

    `malloc_trim` does not release the free end of a thread's heap, up to 64 MB. Only a `free` in
    that heap does, and only with lower thresholds than those of `tune_allocator`.

    Args:
      pools: pools whose threads release their heaps, and their numbers of threads.
      timeout: seconds that threads wait for each other. One that is busy for longer keeps its heap.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    if not (any(_tuned) and pools):
        return
    with release_freed(_RELEASED):
        tasks = []
        for pool, count in pools.items():
            others = threading.Barrier(count)
            tasks += [pool.submit(_release, libc, others, timeout) for _ in range(count)]
        wait(tasks, timeout)


def drop_pages_of_zeros(address: int, size: int) -> None:
    """Return whole pages of zeros to the kernel, which makes each anew when it is touched.

    The memory has to be this process's own, as that of malloc is, and not a file's.
    """
    libc = _glibc()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if libc is not None and length > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _release(libc: ctypes.CDLL, others: threading.Barrier, timeout: float) -> None:
    """Release the free end of this thread's heap; leave the other tasks to the other threads."""
    libc.free(libc.malloc(_RELEASED // 2))
    with contextlib.suppress(threading.BrokenBarrierError):
        others.wait(timeout)


def freeze_objects() -> None:
    """Spare Python's garbage collector what exists now: modules, programs, tokenizers, grammars.

    A collection of all objects takes half a second to a second beside a loaded model, while all
    requests wait, and frees none of them.
    """
    gc.freeze()


def thaw_objects() -> None:
    """Free what was frozen and is in use no more, like an engine that another one replaced."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Have Python's garbage collector run rarely while the block runs.

    Importing JAX and tracing programs create millions of long-lived objects, and collections take
    a tenth of that time without freeing any. Blocks may overlap, also across threads.
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
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


# Memory in huge pages, from which a processor reads weights faster.

# Bytes that are asked of the kernel at a time. Those that no array touches take no memory, but the
# last huge page of each time does.
_CHUNK = 1 << 26
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
    whole = -(-size // _ALIGNMENT) * _ALIGNMENT
    if whole > _CHUNK // 4:
        return _mapped(whole)[:size]
    with _lock:
        if not _rest or len(_rest[0]) < whole:
            _rest[:] = [_mapped(_CHUNK)]
        taken = _rest[0][:whole]
        _rest[0] = _rest[0][whole:]
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
    every = np.frombuffer(memory, np.uint8)
    return every[-every.ctypes.data % _HUGE :][:size]
