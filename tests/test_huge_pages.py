"""Memory of weights: what lets the kernel give it huge pages."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.utils import allocator

HUGE = 1 << 21


def test_large_arrays_begin_with_a_huge_page_and_are_zero() -> None:
    for shape in (3 * HUGE // 4, 4), (1 << 26,), (HUGE + 5, 17):
        array = allocator.zeros(shape, np.uint8)
        assert array.shape == shape
        assert not array.any()
        assert array.ctypes.data % (HUGE if array.nbytes > 1 << 24 else 64) == 0


def test_small_arrays_share_a_chunk() -> None:
    one, other = (allocator.zeros((1000,), np.float32) for _ in range(2))
    one[:] = 1
    assert not other.any()
    assert 0 < abs(other.ctypes.data - one.ctypes.data) < 1 << 26


def test_matrices_of_a_model_share_huge_pages() -> None:
    """Each with pages of its own, 24 matrices of 8.6 MB leave 45 MB unused."""
    arrays = [allocator.zeros((8_716_288,), np.uint8) for _ in range(24)]
    pages = {page for a in arrays for page in range(*huge_pages(a))}
    assert len(pages) * HUGE < 1.08 * sum(a.nbytes for a in arrays)


def huge_pages(array: np.ndarray) -> tuple[int, int]:
    """Return the number of an array's first huge page, and that after its last one."""
    first = array.ctypes.data // HUGE
    return first, -(-(array.ctypes.data + array.nbytes) // HUGE)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_is_private() -> None:
    """Shared memory gets huge pages only where a setting of the system, off by default, says so."""
    array = allocator.zeros((1 << 24,), np.uint8)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, modes, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= array.ctypes.data < last:
            assert modes == "rw-p"
            return
    pytest.fail("the array is in no mapping")
