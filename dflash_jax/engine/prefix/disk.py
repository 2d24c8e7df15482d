"""The prefix cache on disk, for prefixes that were evicted from memory or fed before a restart.

    FOLDER/prefixes/BEFORE-KEY.segment    the bytes of a segment's arrays, one after the other

An entry is the segment of one chunk of a prompt. KEY is a digest of everything that the segment
depends on, the prompt up to the end of the chunk included. BEFORE is the KEY of the chunk before
it: so all entries that continue one can be found and removed with it. Threads do all the work: no
step waits for a disk. A folder that cannot be written to is read all the same, and nothing is added
to it.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from dflash_jax.errors import PlanError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.protocols import is_nnx, nnx_constants
from dflash_jax.kernels.native.build import library
from dflash_jax.utils.private_folder import UnsafeFolderError
from dflash_jax.utils.processor import processor
from dflash_jax.utils.store import Store
from dflash_jax.version import __version__

log = logging.getLogger("dflash_jax.prefixes")
Arrays = list[np.ndarray]  # the leaves of a segment
Kinds = Sequence[tuple[str, tuple[int, ...]]]  # dtypes and shapes of arrays
NAME = "prefixes"  # of the folder inside the plan's prefix folder
ENDING = ".segment"
# Most requests whose prefixes wait to be written. Prefixes of further requests are skipped.
BACKLOG = 8


@dataclasses.dataclass
class DiskCounters:
    """Numbers of events of a prefix folder so far."""

    read: int = 0  # entries that were read
    written: int = 0  # entries that were written
    spoiled: int = 0  # entries that were damaged, and removed
    failed: int = 0  # requests whose prefix could not be written


def identity(graph: PlannedPair, params: Any) -> str:
    """Return a digest of everything that determines a segment's bits.

    That is models, weights, the plan's `cache_key`, kernels, device, versions and `XLA_FLAGS`.
    """
    plan = graph.plan
    device = jax.local_devices()[0]
    versions = [__version__, jax.__version__, jaxlib.__version__, os.environ.get("XLA_FLAGS")]
    kind = [device.platform, device.device_kind, device.platform == "cpu" and processor()]
    kernels = plan.kernels == "native" and library().digest
    models = (graph.pair.target, graph.pair.drafter)
    described = [f"{type(x).__qualname__} {getattr(x, 'config', x)!r}" for x in models]
    constants = {i: nnx_constants(x) for i, x in enumerate(models) if is_nnx(x)}
    leaves = jax.tree_util.tree_leaves_with_path((params, constants) if constants else params)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        weights = list(pool.map(_digest, [leaf for _, leaf in leaves]))
    facts = [versions, kind, described, plan.cache_key, kernels, names, weights]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _digest(leaf: Any) -> str:
    array = np.ascontiguousarray(leaf)
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class PrefixDisk:
    """Segments of prompt prefixes in a folder.

    Args:
      folder: the folder, which is created if missing. Engines and processes of one user may share
        it.
      chunk: number of tokens of a segment.
      budget: most bytes of all entries, those of other models included; the least recently used
        are evicted.
      identity: digest of everything that determines a segment's bits, see `identity`. Entries of
        other identities are never read.
      kinds: dtype and shape of each of a segment's arrays.

    Raises:
      PlanError: the folder cannot be created, or another user could change what is in it.
    """

    def __init__(self, folder: Path, *, chunk: int, budget: int, identity: str, kinds: Kinds):
        self._chunk = chunk
        self._kinds = kinds
        self._identity = f"{identity} {kinds}"
        self._store = _opened(folder, budget)
        self.counters = DiskCounters()
        self._backlog = 0  # number of requests whose prefixes wait to be written
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "prefixes-out")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "prefixes-in")
        self._forgetting: concurrent.futures.Future[None] | None = None
        # Keys of entries that were removed: on a read-only disk they stay, and are not read.
        self._removed: set[str] = set()
        self._writable = True
        self._check_writable()

    def read(
        self, ids: Sequence[int], start: int, most: int, *, salt: str = ""
    ) -> "concurrent.futures.Future[list[tuple[int, Arrays]]] | None":
        """Begin to read segments of a prompt, with the position at which each begins.

        Return None if there is nothing to read, so that no row waits for it.

        Args:
          ids: the prompt.
          start: position of the first segment.
          most: most segments to read.
        """
        prompt = tuple(ids)
        end = start + self._chunk
        if end >= len(prompt) or not self._holds(self._keys(prompt[:end], salt)[-1]):
            return None
        return self._reader.submit(self._read, prompt, start, most, salt)

    def keep(self, ids: Sequence[int], segments: Mapping[int, Any], *, salt: str = "") -> None:
        """Begin to write the segments of a prompt that are missing.

        Args:
          ids: the prompt.
          segments: arrays of segments, by the position at which each ends.
        """
        if self._writable and self._backlog < BACKLOG:
            self._backlog += 1
            self._writer.submit(self._write, tuple(ids), dict(segments), salt)

    def forget(self, ids: Sequence[int], *, after: int = 0, salt: str = "") -> None:
        """Begin to remove a prompt's entries that end after a position, and their continuations."""
        self._forgetting = self._writer.submit(self._remove, tuple(ids), after, salt)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    # -- in the threads -----------------------------------------------------------------------

    def _read(
        self, ids: tuple[int, ...], start: int, most: int, salt: str
    ) -> list[tuple[int, Arrays]]:
        segments: list[tuple[int, Arrays]] = []
        try:
            if self._forgetting is not None:
                self._forgetting.result()
            keys = self._keys(ids[:-1], salt)  # the last token is always fed
            first = start // self._chunk
            for i, key in enumerate(keys[first : first + most], first):
                if not self._holds(key):
                    break
                contents = self._store.get(key)
                if contents is None:
                    self.counters.spoiled += 1
                    self.forget(ids, after=i * self._chunk, salt=salt)
                    break
                segments.append((i * self._chunk, self._arrays(contents)))
            self.counters.read += len(segments)
            self._mark_used(keys[: first + len(segments)])
        except Exception as error:  # the prompt is fed instead, whatever the reason
            log.warning("a prefix was not read from %s: %s", self._store.folder, _brief(error))
        return segments

    def _write(self, ids: tuple[int, ...], segments: dict[int, Any], salt: str) -> None:
        try:
            keys = self._keys(ids[: max(segments)], salt)
            self._mark_used(keys)  # writing the others removes what was used least recently
            for i, key in enumerate(keys):
                end = (i + 1) * self._chunk
                if not self._holds(key):
                    if end not in segments:
                        break  # entries after a gap would never be read
                    self._add(key, segments[end])
            self._mark_used(keys)
        except Exception as error:  # no failure may end the thread
            self.counters.failed += 1
            log.warning("a prefix was not written to %s: %s", self._store.folder, _brief(error))
            self._check_writable()
        finally:
            self._backlog -= 1

    def _add(self, key: str, segment: Any) -> None:
        arrays = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(segment)]
        self._store.put(key, [array.reshape(-1).view(np.uint8).data for array in arrays])
        self._removed.discard(key)
        self.counters.written += 1

    def _remove(self, ids: tuple[int, ...], after: int, salt: str) -> None:
        continuing = defaultdict(list)  # the entries that continue one, by its KEY
        for key in self._store:
            continuing[key.partition("-")[0]].append(key)
        waiting = self._keys(ids, salt)[after // self._chunk :]
        while waiting:
            key = waiting.pop()
            self._store.remove(key)
            if key in self._store:
                self._removed.add(key)
            waiting += continuing.pop(key.partition("-")[2], [])

    def _check_writable(self) -> None:
        """Write nothing from now on if the folder is there and cannot be written to."""
        folder = self._store.folder
        if folder.is_dir() and not os.access(folder, os.W_OK):
            self._writable = False
            log.warning(
                "%s cannot be written to: prefixes are read from it, and none is added", folder
            )

    def _keys(self, ids: tuple[int, ...], salt: str) -> list[str]:
        """Return the key, BEFORE and KEY, of each whole chunk of a prompt."""
        start = json.dumps([self._identity, salt]).encode()  # ASCII, lone surrogates included
        before = hashlib.sha256(start).hexdigest()[:32]
        keys = []
        for end in range(self._chunk, len(ids) + 1, self._chunk):
            chunk = np.asarray(ids[end - self._chunk : end], np.int64).tobytes()
            own = hashlib.sha256(before.encode() + chunk).hexdigest()[:32]
            keys.append(f"{before}-{own}")
            before = own
        return keys

    def _holds(self, key: str) -> bool:
        return key in self._store and key not in self._removed

    def _mark_used(self, keys: list[str]) -> None:
        """Mark entries as used. The last is evicted first, as the others are of use without it."""
        self._store.mark_used(reversed(keys))

    def _arrays(self, contents: bytes) -> Arrays:
        """Return the arrays of an entry, one after the other in its bytes."""
        arrays = []
        offset = 0
        for dtype, shape in self._kinds:
            array = np.ndarray(shape, np.dtype(dtype), contents, offset)
            arrays.append(array)
            offset += array.nbytes
        return arrays


def _opened(folder: Path, budget: int) -> Store:
    """Return the store of a folder. Only the user can read its files, as they tell of prompts.

    Raises:
      PlanError: it cannot be created, or another user could change it.
    """
    try:
        return Store(folder / NAME, ENDING, size=budget)
    except UnsafeFolderError as error:
        raise PlanError(
            f"prefix_folder {folder} cannot be used, since another user could change prompts there:"
            f" {error}"
        ) from error
    except OSError as error:
        raise PlanError(
            f"prefix_folder {folder} cannot be made ({error.strerror or error}), and holds no"
            " prefixes; give a folder that can be written to"
        ) from error


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
