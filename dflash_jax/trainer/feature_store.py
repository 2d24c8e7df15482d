"""A store of the target's features on disk, for token rows that training reads again.

Its parts are complete or absent. A part is an array of all tokens' taps, `NAME.npy`, and an index
of its rows, `NAME.npz`, which is written last. They are in a folder named by a digest of target,
taps and dtype, and rows are found by a digest of their tokens: runs of other targets, drafters and
rows share a folder, and whatever changes is computed anew. Each row has a checksum.
"""

import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import UInt

from dflash_jax.errors import CheckpointError
from dflash_jax.graph.build import jit
from dflash_jax.plan import Weights
from dflash_jax.trainer.files import sound, write_json
from dflash_jax.utils.atomic import new_path

ABOUT = "about.json"
DECODED = "decoded"  # first word of the names of parts of `add_decoded`


def digest(ids: np.ndarray) -> bytes:
    """Return the name of a row: a hash of its token ids."""
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).digest()


def weights_digest(params: dict[str, Any]) -> str:
    """Return a digest of the bits of all parameters, the same on one device and on a mesh."""

    def total(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return bits.astype("uint32").sum()

    shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(params)]
    totals = jax.device_get(jit(lambda tree: jax.tree.map(total, tree))(params))
    text = f"{shapes} {[int(x) for x in jax.tree.leaves(totals)]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class FeatureOrigin:
    """What decides the features of a row, apart from its tokens.

    Attributes:
      target: digest of the target's weights.
      weights: format of its matrices, see `features.reader`.
      taps: hidden states that the drafter reads.
      final: whether the target's final hidden state is kept, too, for distributions.
      width: of a hidden state.
      dtype: of kept values: the one that training computes with, so that nothing is lost.
    """

    target: str
    weights: Weights
    taps: tuple[int, ...]
    final: bool
    width: int
    dtype: str

    @property
    def name(self) -> str:
        """A digest of them all."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def streams(self) -> int:
        """Arrays of `width` for each token."""
        return len(self.taps) + self.final


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """The rows of a part: values [tokens, streams, width] as bits, and best tokens [tokens]."""

    path: Path
    values: np.ndarray
    best: np.ndarray


@dataclasses.dataclass(frozen=True)
class StoredRow:
    """Where the features of a row are."""

    part: StoredPart
    tokens: slice
    crc32: int


class FeatureStore:
    """The parts of an origin in a folder, which is made if it does not exist.

    Threads may add parts, and so may other processes.

    Raises:
      CheckpointError: the folder is damaged, or cannot be written.
    """

    def __init__(self, folder: Path, origin: FeatureOrigin):
        self.folder = folder / origin.name
        self.origin = origin
        self.dtype = np.dtype(getattr(ml_dtypes, origin.dtype, origin.dtype))
        self._rows: dict[bytes, StoredRow] = {}
        about = json.loads(json.dumps(dataclasses.asdict(origin)))
        path = self.folder / ABOUT
        if not path.is_file():
            self._begin(path, about)
        with sound(path):
            recorded = json.loads(path.read_text(encoding="utf-8"))
            if recorded != about:
                raise ValueError(f"it holds {recorded}, expected {about}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk for each token of a row."""
        return self.origin.streams * self.origin.width * self.dtype.itemsize + 4

    def _begin(self, path: Path, about: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_path(path, overwrite=True) as partial:
                write_json(partial, about)
        except (CheckpointError, OSError) as error:
            raise self._unwritable(error) from error

    def add(
        self, name: str, ids: Sequence[np.ndarray], values: np.ndarray, best: np.ndarray
    ) -> None:
        """Write a part.

        Args:
          name: the first word of its name; the rest is a digest of its rows.
          ids: token ids of each row.
          values: unsigned integers [tokens of all rows, streams, width], from `bits`.
          best: int32 [tokens of all rows], the target's argmax token after each.

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        digests = [digest(row) for row in ids]
        rows = row_slices([len(row) for row in ids])
        whole = f"{name}.{digest(np.frombuffer(b''.join(digests), np.uint8)).hex()}"
        index = {
            "sizes": np.asarray([len(row) for row in ids], np.int64),
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
            "crc32": np.asarray([zlib.crc32(values[row].data) for row in rows], np.uint32),
            "best": np.asarray(best, np.int32),
        }
        self._write(f"{whole}.npy", values.nbytes, lambda file: np.save(file, values))
        self._write(f"{whole}.npz", best.nbytes, lambda file: np.savez(file, **index))

    def add_decoded(self, name: str, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write a part of rows that the target decoded greedily.

        The token after each decoded one is the target's argmax, and the taps of the last token,
        which no block reads, are zero.

        Args:
          rows: token ids [n] of each one, and the bits of its taps [streams, n or n-1, width].

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        sizes = [len(ids) for ids, _ in rows]
        shape = (sum(sizes), self.origin.streams, self.origin.width)
        values = np.zeros(shape, self._bits)
        best = np.zeros(sum(sizes), np.int32)
        for places, (ids, taps) in zip(row_slices(sizes), rows, strict=True):
            values[places.start : places.start + taps.shape[1]] = np.moveaxis(taps, 0, 1)
            best[places.start : places.stop - 1] = ids[1:]
        self.add(f"{DECODED}.{name}", [ids for ids, _ in rows], values, best)

    def _write(self, name: str, size: int, write: Callable[[Any], None]) -> None:
        try:
            path = self.folder / name
            with new_path(path, overwrite=True, needed=size) as partial, partial.open("wb") as file:
                write(file)
        except CheckpointError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, reason: Exception) -> CheckpointError:
        return CheckpointError(
            f"features could not be kept in {self.folder}: {reason}; every token needs"
            f" {self.bytes_per_token:,} bytes, and the same command goes on"
        )

    @property
    def _bits(self) -> np.dtype:
        return np.dtype(f"uint{8 * self.dtype.itemsize}")

    def bits(self, values: np.ndarray) -> UInt[np.ndarray, "..."]:
        """Return floats in the kept dtype, as unsigned integers."""
        return np.asarray(values).astype(self.dtype).view(self._bits)

    def open(self) -> "FeatureStore":
        """Read the indices of all complete parts; return the store itself.

        Raises:
          CheckpointError: a part is damaged.
        """
        self._rows = {}
        for path in sorted(self.folder.glob("*.npz")):
            if not path.with_suffix(".npy").is_file():  # removed, or not written yet
                continue
            with sound(path), np.load(path) as index:
                sizes = index["sizes"]
                best = index["best"]
                names = [bytes(row) for row in index["digests"]]
                sums = index["crc32"].tolist()
            with sound(path.with_suffix(".npy")):
                values = np.load(path.with_suffix(".npy"), mmap_mode="r")
                if values.shape != (len(best), self.origin.streams, self.origin.width):
                    raise ValueError(f"it has shape {values.shape}")
            part = StoredPart(path.with_suffix(".npy"), values, best)
            for name, row, crc32 in zip(names, row_slices(sizes.tolist()), sums, strict=True):
                self._rows.setdefault(name, StoredRow(part, row, crc32))
        return self

    def __contains__(self, name: bytes) -> bool:
        """Return whether the features of a row are there; `open` first."""
        return name in self._rows

    def read(self, names: Sequence[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return values [rows, length, streams, width] and best tokens [rows, length].

        Rows are padded with zeros at the end.

        Raises:
          CheckpointError: they are not those that were written.
        """
        shape = (len(names), length, self.origin.streams, self.origin.width)
        values = np.zeros(shape, self._bits)
        best = np.zeros((len(names), length), np.int32)
        for i, name in enumerate(names):
            row = self._rows[name]
            kept = row.part.values[row.tokens]
            with sound(row.part.path):
                if zlib.crc32(kept.data) != row.crc32:
                    raise ValueError("the checksum of a row is wrong")
            values[i, : len(kept)] = kept
            best[i, : len(kept)] = row.part.best[row.tokens]
        return values.view(self.dtype), best


def row_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the tokens of each row among those of all rows."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
