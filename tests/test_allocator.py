"""Freed memory stays in the process, in every thread, until it is released."""

import argparse
import gc
import subprocess
import sys
import weakref

import pytest

from dflash_jax.cli import prepare
from dflash_jax.utils import allocator
from dflash_jax.utils.allocator import fewer_collections, freeze_objects, thaw_objects

ON_GLIBC = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems have no mallopt"
)
COUNT = """
import resource, threading
import numpy as np
from dflash_jax.utils.allocator import tune_allocator

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


REPORT = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.fdopen.restype, libc.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fflush.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""
TUNED = """
import concurrent.futures, ctypes, threading
from dflash_jax.utils.allocator import trim_memory, tune_allocator

assert tune_allocator()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
"""
HOLES = (
    TUNED
    + """
def leave_holes():
    # 16,000 pieces of 10 kB, every second of which stays
    held = [libc.malloc(10_000) for _ in range(16_000)]
    for at in held:
        ctypes.memset(at, 1, 10_000)
    for at in held[::2]:
        libc.free(at)

thread = threading.Thread(target=leave_holes)
thread.start()
thread.join()
before = resident()
trim_memory()
print(before - resident())
"""
)


@ON_GLIBC
def test_free_pieces_between_used_ones_are_released() -> None:
    """Each free piece of 10 kB contains a whole page, so at least 32 of 80 MB are released."""
    command = [sys.executable, "-c", HOLES]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) > 30_000_000


@ON_GLIBC
def test_threads_have_separate_arenas() -> None:
    """With a single arena, malloc would report one heap."""
    command = [sys.executable, "-c", COUNT + REPORT]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.count("<heap nr=") > 1


@ON_GLIBC
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """120 MB of scratch memory are 29,000 pages; heaps of a thread's arena have 64 MB."""
    command = [sys.executable, "-c", COUNT]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 500


def test_the_collector_runs_rarely_until_the_last_of_overlapping_blocks_ends() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        first, second = fewer_collections(), fewer_collections()
        first.__enter__()
        assert gc.get_threshold() == (100_000, 50, 100)
        second.__enter__()
        first.__exit__(None, None, None)
        assert gc.get_threshold() == (100_000, 50, 100)
        second.__exit__(None, None, None)
        assert gc.get_threshold() == (700, 10, 10)
        with pytest.raises(KeyboardInterrupt), fewer_collections():
            raise KeyboardInterrupt
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


HEAPS = (
    TUNED
    + """
def fill(_):
    both.wait(30)
    pieces = [libc.malloc(100_000) for _ in range(400)]
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    for piece in pieces:
        libc.free(piece)

both = threading.Barrier(2)
pool = concurrent.futures.ThreadPoolExecutor(2)
list(pool.map(fill, range(2)))
trim_memory()
kept = resident()
trim_memory({pool: 2}, timeout=60)
print(kept - resident())
list(pool.map(fill, range(2)))
trim_memory()
print(kept - resident())
"""
)


@ON_GLIBC
def test_threads_release_the_free_ends_of_their_heaps_on_request() -> None:
    found = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    released, later = map(int, found.stdout.split())
    assert released > 40_000_000  # of 80
    assert later < 20_000_000  # memory stays in the process again


LOADING = (
    TUNED
    + """
import contextlib, sys
from dflash_jax.utils.allocator import release_freed

def read(_):
    both.wait(30)  # a thread each, with heaps of its own
    pieces = [libc.malloc(100_000) for _ in range(600)]
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    return pieces

both = threading.Barrier(2)
with release_freed() if sys.argv[1:] else contextlib.nullcontext():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pieces = sum(pool.map(read, range(2)), [])
    full = resident()
    for piece in pieces:
        libc.free(piece)
print(full - resident())
kept = resident()
for again in range(2):
    piece = libc.malloc(50_000_000)
    ctypes.memset(piece, 1, 50_000_000)
    libc.free(piece)
print(resident() - kept)
"""
)


@ON_GLIBC
@pytest.mark.parametrize("released", [True, False])
def test_memory_of_threads_that_ended_is_released_after_loading(released: bool) -> None:
    command = [sys.executable, "-c", LOADING, *(["released"] if released else [])]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    given, later = map(int, found.stdout.split())
    # Of 120; each thread's heap may keep a free end of 32.
    assert (given > 50_000_000) == released
    assert later > 30_000_000  # later, freed memory stays in the process


def test_a_collection_skips_what_was_frozen_until_that_is_replaced() -> None:
    class Engine:
        def __init__(self) -> None:
            self.itself = self

    engine = Engine()
    last = weakref.ref(engine)
    freeze_objects()
    del engine
    gc.collect()
    assert last() is not None
    thaw_objects()
    assert last() is None
    assert gc.get_freeze_count() == 0


def test_commands_about_weight_files_give_freed_memory_back(monkeypatch):
    """Only steps of an engine need it again: a conversion would hold every array it wrote."""
    tuned = []
    monkeypatch.setattr(allocator, "tune_allocator", lambda: tuned.append(True))
    prepare(argparse.Namespace(source="tiny"))
    assert not tuned
    prepare(argparse.Namespace(target="tiny"))
    assert tuned
