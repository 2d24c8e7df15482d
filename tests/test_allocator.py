"""Freed memory stays with the process, in every thread."""

import subprocess
import sys

import pytest

COUNT = """
import resource, threading
import numpy as np
from dflash_jax.allocator import tune_allocator

assert tune_allocator()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [np.ones(7_500_000, np.float32) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def repeat():
    found.append([faults() for _ in range(4)])

found = []
repeat()
thread = threading.Thread(target=repeat)
thread.start()
thread.join()
print(max(max(some[1:]) for some in found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no mallopt")
def test_what_was_freed_is_used_again_without_page_faults() -> None:
    """120 MB of scratch memory are 29,000 pages; an arena of a thread has heaps of 64 MB."""
    command = [sys.executable, "-c", COUNT]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 500
