"""Damaged prefix folders: damaged entries are never restored, and cost a prefill at most."""

import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.prefix.disk import Arrays, PrefixDisk
from dflash_jax.utils.store import Store
from tests.engine.test_prefix_disk import CHUNK, PROMPT, SAMPLED, disk, entries, opened, path_of

SMALL = 4
IDS = tuple(range(100, 100 + 3 * SMALL + 1))  # three chunks, and one token that is always fed
KINDS = [("float32", (2, SMALL, 3)), ("int8", (5,)), ("float32", (1,))]


def segments() -> dict[int, Arrays]:
    random = np.random.default_rng(3)
    ends = range(SMALL, len(IDS), SMALL)
    return {e: [random.integers(-99, 99, s).astype(d) for d, s in KINDS] for e in ends}


def small(folder: Path) -> PrefixDisk:
    return PrefixDisk(folder, chunk=SMALL, budget=1 << 20, identity="0" * 32, kinds=KINDS)


def found(one: PrefixDisk) -> dict[int, Arrays]:
    reading = one.read(IDS, 0, 9)
    segments = dict(reading.result(60)) if reading else {}
    one.flush()  # what continues a damaged entry is removed
    return segments


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The second of a prompt's three entries, all of which can be read."""
    one = small(tmp_path / "folder")
    one.keep(IDS, segments())
    one.flush()
    assert sorted(found(one)) == [0, SMALL, 2 * SMALL]
    return path_of(one, IDS[: 2 * SMALL])


def check(written: Path) -> set[int]:
    """Return the positions of restored segments, whose bits must be those that were written."""
    came = found(small(written.parents[1]))
    expected = segments()
    for start, arrays in came.items():
        for array, kept in zip(arrays, expected[start + SMALL], strict=True):
            assert (array.dtype, array.shape) == (kept.dtype, kept.shape)
            np.testing.assert_array_equal(array, kept)
    return set(came)


@pytest.mark.sample("16")
@pytest.mark.parametrize("bit", [0x01, 0x10, 0x80])
def test_no_flipped_bit_is_ever_restored(written: Path, bit: int) -> None:
    whole = written.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= bit
        written.write_bytes(damaged)
        assert check(written) == {0}, place
        assert not written.exists()
        restore(written)


def restore(written: Path) -> None:
    one = small(written.parents[1])
    one.keep(IDS, segments())  # the third entry is removed with the second
    one.flush()
    assert written.exists()


def test_no_truncated_file_is_ever_restored(written: Path) -> None:
    whole = written.read_bytes()
    for length in (*range(len(whole)), len(whole) + 1, 2 * len(whole)):
        written.write_bytes((whole + whole)[:length])
        assert check(written) == {0}, length
        assert not written.exists()
        restore(written)


def fifo(place: Path) -> None:
    os.mkfifo(place)


def folder(place: Path) -> None:
    place.mkdir()
    (place / "within").write_text("x")


def loop(place: Path) -> None:
    place.symlink_to(place.name)


def nowhere(place: Path) -> None:
    place.symlink_to("missing")


def endless(place: Path) -> None:
    place.symlink_to("/dev/zero")


def elsewhere(place: Path) -> None:
    """Make a link to the moved file or folder, whose contents are right."""
    place.symlink_to(place.parents[2] / "moved")


def empty(place: Path) -> None:
    place.touch()


def sparse(place: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 42)  # four terabytes that take no space on disk


KINDS_OF_PLACES = [fifo, folder, loop, nowhere, endless, elsewhere, empty, sparse]


@pytest.fixture
def few_bytes() -> Iterator[None]:
    """Limit a test to two gigabytes more than the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("make", KINDS_OF_PLACES)
def test_irregular_files_are_removed_and_the_prompt_is_fed(
    tiny: Engine, make: Callable[[Path], None], tmp_path: Path, few_bytes: None
) -> None:
    truth = tiny.generate(PROMPT, **SAMPLED).token_ids
    home = tmp_path / "folder"
    engine = opened(tiny, home)
    engine.generate(PROMPT, max_tokens=1)
    engine.close()
    place = path_of(disk(engine), PROMPT[: 2 * CHUNK])
    shutil.move(place, tmp_path / "moved")
    make(place)
    engine = opened(tiny, home)
    again = engine.generate(PROMPT, **SAMPLED)
    assert (again.token_ids, again.stats.cached_tokens) == (truth, CHUNK)
    engine.close()
    assert disk(engine).counters.failed == 0
    assert all(stat.S_ISREG(entry.lstat().st_mode) for entry in entries(home))
    if make is elsewhere:
        assert (tmp_path / "moved").exists()  # the link is removed, not its target
    healed = opened(tiny, home).generate(PROMPT, **SAMPLED)
    assert (healed.token_ids, healed.stats.cached_tokens) == (truth, 3 * CHUNK)


READ_ONLY = """
import ctypes, errno, logging, pathlib, sys
import numpy as np
from tests.engine.test_prefix_damage import IDS, SMALL, found, segments, small

class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
# Drop the capabilities that let root write anywhere.
libc, header, sets = ctypes.CDLL(None), Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(ctypes.byref(header), sets) == 0
for i in range(3):
    sets[i] &= ~0b1110
assert libc.capset(ctypes.byref(header), sets) == 0
logging.basicConfig()
place = pathlib.Path(sys.argv[1])
try:
    (place / "probe").touch()
    sys.exit(7)
except OSError as error:
    assert error.errno in (errno.EACCES, errno.EROFS)
one = small(place)
print(sorted(found(one)))
one.keep((1, *IDS), segments())
one.flush()
print(one.counters.failed, one.counters.written)
"""


@pytest.mark.exhaustive
def test_a_read_only_folder_is_read_and_one_line_says_that_none_is_added(
    written: Path,
) -> None:
    home = written.parents[1]
    written.write_bytes(b"damaged")
    places = [home, *home.rglob("*")]
    for place in places:
        place.chmod(0o500 if place.is_dir() else 0o400)
    try:
        command = [sys.executable, "-c", READ_ONLY, str(home)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        for place in places:
            place.chmod(0o700)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0]\n0 0\n"
    line, damaged = ended.stderr.splitlines()
    assert damaged.endswith(f"{written} was damaged, and is made again")
    assert "cannot be written to: prefixes are read from it, and none is added" in line


def test_an_unexpected_error_costs_the_prefix_but_not_the_request(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no\nroom")

    one = small(written.parents[1])
    monkeypatch.setattr(Store, "get", fail)
    assert found(one) == {}
    assert caplog.records[0].getMessage().endswith(": no")
    monkeypatch.undo()
    assert len(found(one)) == 3
