"""The prefix cache on disk, for prefixes that were evicted from memory or fed before a restart.

    FOLDER/prefixes-IDENTITY/KEY/about.json   what the entry is; dtypes, shapes and a checksum
    FOLDER/prefixes-IDENTITY/KEY/arrays       the segment: the bytes of its arrays, one by one

An entry is one chunk of a prefix. It names the entry it continues, so replacing an entry
invalidates everything that continued the old one. Entries appear atomically; one that is damaged,
or foreign, is a miss and is removed. Threads do all the work: no step waits for a disk. Where the
folder cannot be written to, its entries are read all the same, and none is added.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jaxlib
import numpy as np

from dflash_jax.errors import CheckpointError, PlanError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.protocols import is_nnx, nnx_constants
from dflash_jax.kernels.native.build import library
from dflash_jax.utils.atomic import new_path, remove
from dflash_jax.utils.private_folder import UnsafeFolderError, is_own, open_file, prepare
from dflash_jax.utils.processor import processor
from dflash_jax.version import __version__

# Files of the prefix cache: written once, and read without trusting their contents.


Arrays = list[np.ndarray]  # the leaves of a segment
Kinds = Sequence[tuple[str, tuple[int, ...]]]  # dtypes and shapes of arrays
ABOUT_BYTES = 2**20  # more than any description of a segment takes, without its token ids
BYTES_PER_ID = 24  # digits, comma and space of a token id in JSON


def write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    """Write arrays to a file; return a description of them for `read_arrays`, as JSON values.

    Orbax is not used: if one of its writes fails, the others report to an event loop that is
    already closed, which prints tracebacks.
    """
    total = 0
    with _new(path) as file:
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            total = zlib.crc32(data, total)
            file.write(data)
    return {"arrays": [[str(x.dtype), list(x.shape)] for x in arrays], "crc32": total}


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Write the description of a segment, which holds its tokens, as JSON."""
    with _new(path) as file:
        file.write(json.dumps(about).encode())


def _new(path: Path) -> BinaryIO:
    """Open a new file for writing that only the user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def read_about(path: Path, num_ids: int) -> Any:
    """Return the contents of the JSON file that describes a segment of `num_ids` tokens.

    Raises:
      OSError, ValueError, RecursionError: the file is not JSON, or too large.
    """
    return json.loads(_read(path, None, ABOUT_BYTES + BYTES_PER_ID * num_ids))


def read_arrays(
    path: Path, about: Mapping[str, Any], *, kinds: Kinds | None, max_bytes: int
) -> Arrays:
    """Return the arrays of a file that `write_arrays` wrote.

    Nothing is allocated for arrays of other kinds, nor for more than the file holds.

    Args:
      about: the description that `write_arrays` returned, read from disk; not trusted.
      kinds: dtypes and shapes to expect; None accepts those that `about` lists.
      max_bytes: limit of the file's size if `kinds` is None.

    Raises:
      OSError, ValueError, KeyError, TypeError: the arrays are not those that were written.
    """
    listed = about["arrays"]
    if kinds is not None and listed != [[dtype, list(shape)] for dtype, shape in kinds]:
        raise ValueError(f"{path} holds other arrays than those of a segment")
    shapes = [(np.dtype(dtype), tuple(map(int, shape))) for dtype, shape in listed]
    if any(dtype.hasobject or min(shape, default=0) < 0 for dtype, shape in shapes):
        raise ValueError(f"{path} is described with impossible arrays")
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    if kinds is None and sum(sizes) > max_bytes:
        raise ValueError(f"{path} is described with more than {max_bytes} bytes")
    data = _read(path, sum(sizes), sum(sizes))
    if zlib.crc32(data) != about["crc32"]:
        raise ValueError(f"{path} is damaged")
    ends = list(itertools.accumulate(sizes))
    return [
        np.frombuffer(data[end - size : end], dtype).reshape(shape)
        for (dtype, shape), size, end in zip(shapes, sizes, ends, strict=True)
    ]


def _read(path: Path, size: int | None, max_bytes: int) -> bytes:
    """Return the bytes of a file whose size must be `size`, if given, and at most `max_bytes`."""
    descriptor = open_file(path)
    try:
        found = os.fstat(descriptor)
        if found.st_size > max_bytes or size not in (None, found.st_size):
            raise ValueError(f"{path} is {found.st_size} bytes long")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    finally:
        os.close(descriptor)
    if len(data) != found.st_size:
        raise ValueError(f"{path} was cut off while it was read")
    return data


def mode_of(path: Path) -> int:
    """Return the file mode at a path, without following links; 0 if that fails."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return stat.S_ISDIR(mode_of(path))


log = logging.getLogger("dflash_jax.prefixes")
ABOUT, ARRAYS, FIRST = "about.json", "arrays", "first"
HOME = re.compile(r"prefixes-[0-9a-f]{32}")
ENTRY = re.compile(r"[0-9a-f]{32}")
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.(partial|old)-[0-9a-f-]+")
ABANDONED = 3600 * 10**9  # nanoseconds after which a partial entry is not being written any more
BACKLOG = 8  # requests whose prefixes may wait to be written; those of others are skipped
LEFT = 0.9  # share of the budget that eviction leaves


@dataclasses.dataclass
class DiskCounters:
    """Events of a prefix folder so far, in entries."""

    read: int = 0
    written: int = 0
    spoiled: int = 0  # damaged or foreign, and removed
    failed: int = 0  # requests whose prefix could not be written
    skipped: int = 0  # requests that ended while too many waited


def identity(graph: PlannedPair, params: Any) -> str:
    """Return a digest of everything that determines a segment's bits.

    That is models, weights, the plan's `cache_key`, kernels, device, versions and `XLA_FLAGS`.
    """
    device = jax.local_devices()[0]
    versions = [__version__, jax.__version__, jaxlib.__version__, os.environ.get("XLA_FLAGS")]
    kind = [device.platform, device.device_kind, device.platform == "cpu" and processor()]
    plan, models = graph.plan, (graph.pair.target, graph.pair.drafter)
    made = [f"{type(x).__qualname__} {getattr(x, 'config', x)!r}" for x in models]
    constants = {i: nnx_constants(x) for i, x in enumerate(models) if is_nnx(x)}
    leaves = jax.tree_util.tree_leaves_with_path((params, constants) if constants else params)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        weights = list(pool.map(lambda leaf: _digest(leaf[1]), leaves))
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    kernels = plan.kernels == "native" and library().digest
    facts = [versions, kind, made, plan.cache_key, kernels, names, weights]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _digest(leaf: Any) -> str:
    array = np.ascontiguousarray(leaf)
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class PrefixDisk:
    """Segments of prompt prefixes, of `chunk` tokens each, in a folder.

    Args:
      folder: created if missing. Engines and processes of one user may share it.
      budget: most bytes of all entries, those of other models included; the least recently used
        are evicted.
      identity: entries of other identities are never read.
      kinds: dtype and shape of a segment's arrays; others are never read. None accepts any.

    Raises:
      PlanError: the folder cannot be created, or another user could change what is in it.
    """

    def __init__(
        self, folder: Path, *, chunk: int, budget: int, identity: str, kinds: Kinds | None = None
    ):
        self._folder, self._chunk, self._budget, self._kinds = folder, chunk, budget, kinds
        self._identity, self._home = identity, _private(folder, f"prefixes-{identity}")
        self.counters = DiskCounters()
        self._bytes = budget + 1  # of all entries when last counted; counting is due
        self._since = 0  # bytes written since then
        self._backlog = 0
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "prefixes-out")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "prefixes-in")
        self._forgetting: concurrent.futures.Future[None] | None = None
        self._lost: set[Path] = set()  # entries that could not be removed
        self._writable = True
        self._check_writable()

    def read(
        self, ids: Sequence[int], start: int, most: int, *, salt: str = ""
    ) -> "concurrent.futures.Future[list[tuple[int, Arrays]]] | None":
        """Begin to read up to `most` segments of a prompt from `start` on, with their positions.

        Return None if there is nothing to read, so that no row waits for it.
        """
        ids, end = tuple(ids), start + self._chunk
        if end >= len(ids) or not is_folder(self._place(ids[:end], salt)):
            return None
        return self._reader.submit(self._read, ids, start, most, salt)

    def keep(self, ids: Sequence[int], segments: Mapping[int, Any], *, salt: str = "") -> None:
        """Begin to write the missing segments of a prompt, by the position each ends at."""
        if not self._writable:
            return
        if self._backlog >= BACKLOG:
            self.counters.skipped += 1
            return
        self._backlog += 1
        self._writer.submit(self._write, tuple(ids), dict(segments), salt)

    def forget(self, ids: Sequence[int], *, after: int = 0, salt: str = "") -> None:
        """Begin to remove the entries of a prompt that end past `after`."""
        self._forgetting = self._writer.submit(self._drop, tuple(ids), after, salt)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    # -- the threads --------------------------------------------------------------------------

    def _read(
        self, ids: tuple[int, ...], start: int, most: int, salt: str
    ) -> list[tuple[int, Arrays]]:
        found: list[tuple[int, Arrays]] = []
        before, used = FIRST, []
        try:
            if self._forgetting is not None:
                self._forgetting.result()
            for end in range(self._chunk, len(ids), self._chunk):
                place = self._place(ids[:end], salt)
                about = self._about(place, ids[end - self._chunk : end], before)
                arrays = self._arrays(place, about) if about and end > start else []
                if about is None or arrays is None or len(found) == most:
                    break
                before = about["token"]
                used.append(place)
                found += [(end - self._chunk, arrays)] if end > start else []
            self.counters.read += len(found)
            self._touch(used)
        except Exception as error:  # the prompt is fed instead, whatever the reason
            log.warning("a prefix was not read from %s: %s", self._home, _brief(error))
        return found

    def _write(self, ids: tuple[int, ...], segments: dict[int, Any], salt: str) -> None:
        before, used = FIRST, []
        try:
            for end in range(self._chunk, max(segments) + 1, self._chunk):
                place, chunk = self._place(ids[:end], salt), ids[end - self._chunk : end]
                about = self._about(place, chunk, before)
                if about is None and end not in segments:
                    break  # entries after a gap would never be found
                before = about["token"] if about else self._add(place, chunk, before, segments[end])
                used.append(place)
            self._touch(used)
            self._make_room()
        except Exception as error:  # no failure may end the thread
            self.counters.failed += 1
            log.warning("a prefix was not written to %s: %s", self._home, _brief(error))
            self._check_writable()
        finally:
            self._backlog -= 1

    def _add(self, place: Path, chunk: tuple[int, ...], before: str, segment: Any) -> str:
        arrays = [np.asarray(x) for x in jax.tree.leaves(segment)]
        size, token = sum(x.nbytes for x in arrays), secrets.token_hex(8)
        try:
            with new_path(place, overwrite=False, needed=size, durable=False) as partial:
                partial.mkdir(mode=0o700)
                about = write_arrays(partial / ARRAYS, arrays)
                about |= {"identity": self._identity, "continues": before}
                about |= {"token": token, "ids": list(map(int, chunk))}
                write_about(partial / ABOUT, about)
        except CheckpointError:
            about = self._about(place, chunk, before)  # another engine may have been faster
            if about is None:
                raise
            return about["token"]
        self.counters.written += 1
        size = _size(place)
        self._bytes, self._since = self._bytes + size, self._since + size
        return token

    def _drop(self, ids: tuple[int, ...], after: int, salt: str) -> None:
        for end in range(after + self._chunk, len(ids) + 1, self._chunk):
            self._remove(self._place(ids[:end], salt))

    def _remove(self, place: Path) -> None:
        """Remove an entry; one that stays, as on a read-only disk, is not read any more."""
        remove(place)
        if mode_of(place):
            self._lost.add(place)

    def _check_writable(self) -> None:
        """Write nothing from now on if the folder is there and cannot be written to."""
        if is_folder(self._home) and not os.access(self._home, os.W_OK):
            self._writable = False
            log.warning(
                "%s cannot be written to: prefixes are read from it, and none is added", self._home
            )

    def _place(self, prefix: tuple[int, ...], salt: str = "") -> Path:
        salted = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""
        key = hashlib.sha256(salted + np.asarray(prefix, np.int64).tobytes())
        return self._home / key.hexdigest()[:32]

    def _about(self, place: Path, chunk: tuple[int, ...], before: str) -> dict[str, Any] | None:
        """Return the description of an entry; None if it is not valid, and remove it then."""
        if place in self._lost:
            return None
        if not is_folder(place):
            if mode_of(place):  # a file or a link where an entry belongs
                self._spoil(place)
            return None
        try:
            about = read_about(place / ABOUT, self._chunk)
            found = about["identity"], about["continues"], tuple(about["ids"])
            if found == (self._identity, before, chunk) and isinstance(about["token"], str):
                return about
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        self._spoil(place)
        return None

    def _arrays(self, place: Path, about: dict[str, Any]) -> Arrays | None:
        """Return the arrays of an entry; None if they are not those that were written."""
        try:
            limits = {"kinds": self._kinds, "max_bytes": self._budget}
            return read_arrays(place / ARRAYS, about, **limits)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            self._spoil(place)
            return None

    def _spoil(self, place: Path) -> None:
        self.counters.spoiled += 1
        self._remove(place)

    def _touch(self, places: list[Path]) -> None:
        """Mark entries as used; the last is evicted first."""
        now = time.time_ns()
        for i, place in enumerate(reversed(places)):
            with contextlib.suppress(OSError):  # another process evicted it
                os.utime(place, ns=(now, now + i))

    def _make_room(self) -> None:
        """Evict the least recently used entries while they exceed the budget, and old fragments.

        Entries of other engines are counted whenever this one has written enough. Entries that are
        being written are neither counted nor removed.
        """
        if self._bytes > self._budget or self._since > self._budget * (1 - LEFT):
            self._since = 0
            entries = sorted((_used(place), place) for place in self._inside(ENTRY))
            sizes = {place: _size(place) for _, place in entries}
            self._bytes = sum(sizes.values())
            if self._bytes > self._budget:
                for place, size in sizes.items():
                    if self._bytes <= int(self._budget * LEFT):
                        break
                    remove(place)
                    self._bytes -= size
            for place in self._inside(PARTIAL):
                if _used(place) < time.time_ns() - ABANDONED:
                    remove(place)

    def _inside(self, kind: re.Pattern[str]) -> list[Path]:
        homes = [x for x in self._folder.iterdir() if HOME.fullmatch(x.name) and is_own(x)]
        return [x for home in homes for x in home.iterdir() if kind.fullmatch(x.name)]


def _private(folder: Path, name: str) -> Path:
    """Return the folder of entries, which only the user can read, as they hold prompts.

    Raises:
      PlanError: it cannot be created, or another user could change it.
    """
    try:
        home = prepare(folder / name)
        if is_own(home) and os.access(home, os.W_OK):
            home.chmod(home.stat().st_mode & 0o700)
    except UnsafeFolderError as error:
        raise PlanError(
            f"prefix_folder {folder} cannot be used, since another user could change prompts there:"
            f" {error}"
        ) from error
    except OSError as error:
        raise PlanError(
            f"prefix_folder {folder} cannot be made ({error.strerror or error}), and holds no"
            " prefixes of this model; give a folder that can be written to"
        ) from error
    return home


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _used(place: Path) -> int:
    """Return when an entry was last used, in nanoseconds; 0 if it was removed meanwhile."""
    try:
        return place.lstat().st_mtime_ns
    except OSError:
        return 0


def _size(place: Path) -> int:
    """Return the bytes of an entry's files, without those removed meanwhile."""
    found = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                found += Path(folder, name).lstat().st_size
    return found
