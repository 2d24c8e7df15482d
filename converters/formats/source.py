"""The interface of weight files: named tensors that are read lazily."""

import abc
import math
import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_jax.config.fields import LFS_START, check_content
from dflash_jax.errors import CheckpointError

Rows = slice | np.ndarray


class TensorSource(Protocol):
    """Named tensors in row-major order.

    A row is one slice along the last axis; the rows of a vector are its elements.
    """

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape, outermost axis first."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`; quantised tensors are read as float32."""
        ...

    def kind(self, name: str) -> str:
        """Return the stored type as its format spells it, such as "BF16" or "Q4_K"."""
        ...

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the whole tensor; a view of the mapped file if no decoding is needed."""
        ...

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]; of a vector as [rows, 1]."""
        ...


def as_rows(array: np.ndarray) -> np.ndarray:
    """Return a row-major array as [rows, last axis]; a vector [N] as [N, 1]."""
    width = array.shape[-1] if array.ndim > 1 else 1
    return array.reshape(array.size // width if width else 0, width)


def rows_of_view(view: np.ndarray, shape: tuple[int, ...], rows: Rows) -> np.ndarray:
    """Return chosen rows of an array of `shape` as [rows, last axis].

    Args:
      view: an array in any memory order that has these elements when it is flattened. A slice
        copies only the part along its first axis that holds the rows.
    """
    width = shape[-1] if len(shape) > 1 else 1
    each, rest = divmod(view.size // view.shape[0], width)
    if not isinstance(rows, slice) or rest:
        return as_rows(np.ascontiguousarray(view).reshape(shape))[rows]
    first, last, _ = rows.indices(view.size // width)
    part = np.ascontiguousarray(view[first // each : -(-last // each)]).reshape(-1, width)
    start = first - first // each * each
    return part[start : start + max(last - first, 0)]


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only.

    Raises:
      CheckpointError: it is missing, empty, a pipe or a pointer of Git LFS, or cannot be read.
    """
    try:
        if path.is_fifo():  # opening one would wait for a writer
            raise CheckpointError(f"{path} is a pipe; give a file, which can be read at any place")
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path} is empty; fetch it again") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give a weight file that exists"
        ) from None
    check_content(path, buffer[: len(LFS_START)])
    return buffer


def mapped_files(source: object) -> tuple[mmap.mmap, ...]:
    """Return the mapped files that a source reads; sources of arrays in memory have none."""
    return getattr(source, "buffers", ())


def trim_mapped_memory(read: object) -> None:
    """Have pages of mapped files leave the memory of the process.

    They come back, from the file or the kernel's copy of it, when they are read again. Without
    this, loading and writing need memory for the file beside what is made from it.

    Args:
      read: an array, whose pages leave if it shows a part of a mapped file; or a source, all of
        whose files' pages leave.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    if not isinstance(read, np.ndarray):
        for buffer in mapped_files(read):
            buffer.madvise(mmap.MADV_DONTNEED)
        return
    base: Any = read
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap):
        return
    first, last = np.lib.array_utils.byte_bounds(read)
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    start = (first - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, last - begin - start)


# A source with some tensors decoded on reading.


class DecodedSource(abc.ABC):
    """A source with some tensors decoded to float32 and the others unchanged.

    Args:
      decoded: stored name of each decoded tensor.
      hidden: stored tensors that are not shown, such as scales.
    """

    def __init__(self, source: TensorSource, decoded: dict[str, str], hidden: set[str]):
        self._source = source
        self._decoded = decoded
        self._names = [n for n in source.names() if n not in hidden]
        self._names += [n for n in decoded if n not in set(self._names)]

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """Return the mapped files."""
        return mapped_files(self._source)

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, decoded ones last unless they keep their name."""
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return np.dtype(np.float32) if name in self._decoded else self._source.dtype(name)

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self._source.kind(self._decoded.get(name, name))

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file, without scales."""
        return self._source.nbytes(self._decoded.get(name, name))

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        if name not in self._decoded:
            return self._source.read(name)
        shape = self.shape(name)
        rows = math.prod(shape[:-1])
        return self.read_rows(name, slice(0, rows)).reshape(shape)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        if name not in self._decoded:
            return self._source.read_rows(name, rows)
        return self._decode(name, rows)

    @abc.abstractmethod
    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        """Return rows of a decoded tensor as float32 [rows, last axis]."""
