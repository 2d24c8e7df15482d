"""The target's features of token rows, on disk: parts that are complete or absent.

A part is an array of all tokens' taps, `NAME.npy`, and an index of its rows, `NAME.npz`, which is
written last. Rows are found by a digest of their tokens, so the order of rows does not matter.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from dflash_jax.errors import CheckpointError
from dflash_jax.train.files import saved_as, sound

ABOUT = "about.json"
DECODED = "decoded"  # first word of the names of parts of `add_decoded`
Place = tuple[int, int, int]  # part, first token, tokens


def digest(ids: np.ndarray) -> bytes:
    """Return the name of a row: a hash of its token ids."""
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).digest()


class FeatureStore:
    """The parts in a folder, which is made if it does not exist.

    Values are bfloat16 for a bfloat16 target, otherwise float16. Threads may add parts.

    Args:
      streams: arrays of width `width` for each token: the taps, and the final hidden state if
        the objective needs it.

    Raises:
      CheckpointError: the folder is damaged or of another shape.
    """

    def __init__(self, folder: Path, *, dtype: str, streams: int, width: int):
        self.folder, self.streams, self.width = folder, streams, width
        kind = "bfloat16" if dtype == "bfloat16" else "float16"
        self._dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        about: dict[str, int | str] = {"dtype": kind, "streams": streams, "width": width}
        if not folder.is_dir():
            self._written(lambda: self._begin(about))
        with sound(folder):
            recorded = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            if recorded != about:
                raise ValueError(f"it holds {recorded}, expected {about}")
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # values, best
        self._places: dict[bytes, Place] = {}
        self._decoded: set[bytes] = set()

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk for each token of a row."""
        return self.streams * self.width * 2 + 4

    def _begin(self, about: dict[str, int | str]) -> None:
        with saved_as(self.folder, folder=True) as partial:
            (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def has(self, name: str) -> bool:
        """Return whether a part is complete."""
        return (self.folder / f"{name}.npz").is_file()

    def add(
        self, name: str, ids: Sequence[np.ndarray], values: np.ndarray, best: np.ndarray
    ) -> None:
        """Write a part.

        Args:
          ids: token ids of each row.
          values: uint16 [tokens of all rows, streams, width], from `rounded`.
          best: int32 [tokens of all rows], the target's argmax token after each.

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        self._written(lambda: self._add(name, ids, values, best))

    def add_decoded(self, name: str, found: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write a part of rows that the target decoded greedily.

        The token after each decoded one is the target's argmax, and the taps of the last token,
        which no block reads, are zero.

        Args:
          found: token ids [n] of each row, and its taps [streams, n or n-1, width].

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        sizes = [len(ids) for ids, _ in found]
        values = np.zeros((sum(sizes), self.streams, self.width), np.uint16)
        best = np.zeros(sum(sizes), np.int32)
        starts = np.cumsum([0, *sizes[:-1]])
        for start, (ids, taps) in zip(starts.tolist(), found, strict=True):
            values[start : start + taps.shape[1]] = np.moveaxis(taps, 0, 1)
            best[start : start + len(ids) - 1] = ids[1:]
        self.add(f"{DECODED}.{name}", [ids for ids, _ in found], values, best)

    def _add(
        self, name: str, ids: Sequence[np.ndarray], values: np.ndarray, best: np.ndarray
    ) -> None:
        with saved_as(self.folder / f"{name}.npy") as partial, partial.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is found out at once
                os.posix_fallocate(file.fileno(), 0, values.nbytes)
            np.save(file, values)
        sizes = np.asarray([len(row) for row in ids], np.int64)
        digests = np.frombuffer(b"".join(map(digest, ids)), np.uint8).reshape(-1, 16)
        with saved_as(self.folder / f"{name}.npz") as partial, partial.open("wb") as file:
            np.savez(file, sizes=sizes, digests=digests, best=np.asarray(best, np.int32))

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return floats in the stored type, as uint16.

        Raises:
          CheckpointError: a number overflows float16.
        """
        with np.errstate(over="ignore"):
            rounded = np.asarray(values).astype(self._dtype)
        if self._dtype == np.float16 and not np.isfinite(rounded).all():
            raise CheckpointError(
                "hidden states of this target do not fit float16; choose features=online, or"
                " dtype=bfloat16"
            )
        return rounded.view(np.uint16)

    def open(self) -> "FeatureStore":
        """Read the indices of all complete parts; return the store itself.

        Raises:
          CheckpointError: a part is damaged.
        """
        self._parts, self._places, self._decoded = [], {}, set()
        for path in sorted(self.folder.glob("*.npz")):
            with sound(path), np.load(path) as index:
                sizes, best = index["sizes"], index["best"]
                digests = [bytes(row) for row in index["digests"]]
            with sound(path.with_suffix(".npy")):
                values = np.load(path.with_suffix(".npy"), mmap_mode="r")
                if values.shape != (len(best), self.streams, self.width):
                    raise ValueError(f"it has shape {values.shape}")
            starts = np.cumsum([0, *sizes[:-1]])
            self._parts.append((values, best))
            for name, start, size in zip(digests, starts.tolist(), sizes.tolist(), strict=True):
                self._places.setdefault(name, (len(self._parts) - 1, start, size))
            if path.name.startswith(DECODED):
                self._decoded.update(digests)
        return self

    def was_decoded(self, name: bytes) -> bool:
        """Return whether a row was recorded while it was decoded; `open` first."""
        return name in self._decoded

    def read(self, names: Sequence[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return values [rows, length, streams, width] and best tokens [rows, length].

        Rows are padded with zeros at the end.
        """
        values = np.zeros((len(names), length, self.streams, self.width), np.uint16)
        best = np.zeros((len(names), length), np.int32)
        for i, name in enumerate(names):
            part, start, size = self._places[name]
            stored, stored_best = self._parts[part]
            values[i, :size] = stored[start : start + size]
            best[i, :size] = stored_best[start : start + size]
        return values.view(self._dtype), best

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise CheckpointError(
                f"the feature cache {self.folder} could not be written"
                f" ({error.strerror or error}); every token needs {self.bytes_per_token:,} bytes:"
                " free some space and run the same command to resume, or choose features=online,"
                " which needs none, into another folder"
            ) from error
