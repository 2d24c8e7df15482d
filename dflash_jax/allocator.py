"""Keeps glibc from handing big temporaries back to the kernel after every step.

XLA on a CPU allocates scratch memory per call; with glibc's defaults each call page-faults it
anew, which costs up to 7x on bf16 products. All threads share one arena: those of their own go
back whole whenever they are empty, whatever the threshold. Other systems need nothing.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def tune_allocator() -> bool:
    """Makes malloc keep freed memory; True if this process runs on glibc and took it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1))
    return all([bool(mallopt(*setting)) for setting in settings])
