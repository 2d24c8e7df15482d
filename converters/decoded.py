"""A source with some tensors decoded on reading."""

import abc
import math

import numpy as np

from dflash_jax.converters.source import Rows, TensorSource


class DecodedSource(abc.ABC):
    """A source with some tensors decoded to float32 and the others unchanged.

    Args:
      decoded: stored name of each decoded tensor.
      hidden: stored tensors that are not shown, such as scales.
    """

    def __init__(self, source: TensorSource, decoded: dict[str, str], hidden: set[str]):
        self._source, self._decoded = source, decoded
        self._names = [n for n in source.names() if n not in hidden]
        self._names += [n for n in decoded if n not in set(self._names)]

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
