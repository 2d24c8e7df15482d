"""What every weight file looks like from outside: named, lazily read tensors."""

import mmap
from pathlib import Path
from typing import Protocol

import numpy as np

from dflash_jax.errors import CheckpointError

Rows = slice | np.ndarray


class TensorSource(Protocol):
    """Named tensors in row-major order.

    A row is one run along the last axis; the rows of a vector are its elements.
    """

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, outermost axis first."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """What `read` returns; quantised tensors are read as float32."""
        ...

    def kind(self, name: str) -> str:
        """The stored type as its format spells it, such as "BF16" or "Q4_K"."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The whole tensor; a view of the mapped file where no decoding is needed."""
        ...

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Chosen rows as [rows, last axis]; of a vector [rows, 1]."""
        ...


def as_rows(array: np.ndarray) -> np.ndarray:
    """A row-major array as [rows, last axis]; a vector [N] as [N, 1]."""
    width = array.shape[-1] if array.ndim > 1 else 1
    return array.reshape(array.size // width if width else 0, width)


def map_file(path: Path) -> mmap.mmap:
    """A file mapped read-only; a missing or empty one is refused by name."""
    try:
        if path.is_fifo():  # to open one would wait for somebody who writes
            raise CheckpointError(f"{path} is a pipe; give a file, which can be read at any place")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path} is empty; fetch it again") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give a weight file that exists"
        ) from None
