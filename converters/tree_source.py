"""A parameter tree as canonical tensors, for export and comparison."""

import collections
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from dflash_jax import families
from dflash_jax.checkpoint import BATCH, Checkpoint, Keys, Leaf, Params, batches
from dflash_jax.config import AttentionConfig
from dflash_jax.converters.formats.slots import TensorPart
from dflash_jax.converters.formats.source import Rows, rows_of_view
from dflash_jax.errors import CheckpointError

KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int32": "I32",
}


class TreeSource:
    """A `TensorSource` over a parameter tree, whose leaves are NumPy arrays or convert to them."""

    def __init__(self, params: Params, config: AttentionConfig):
        self._params = params
        leaves = {}
        for slot in families.slots(config):
            array = leaf(params, slot.path)
            if array is not None:
                leaves[slot.path] = _described(array)
        self._describe(leaves, config)

    def _describe(self, leaves: Mapping[Keys, Leaf], config: AttentionConfig) -> None:
        self._parts: dict[str, tuple[TensorPart, Keys]] = {}
        self._leaves = leaves
        lines = []
        for slot in families.slots(config):
            stored = leaves.get(slot.path)
            if stored is None or stored.shape != slot.shape:
                said = "missing" if stored is None else f"of shape {list(stored.shape)}"
                lines.append(f"{'/'.join(slot.path)} is {said}, expected {list(slot.shape)}")
                continue
            self._parts.update({part.name: (part, slot.path) for part in slot.parts})
        if lines:
            raise CheckpointError(
                "the parameters do not fit their configuration; give the two that belong"
                " together\n  " + "\n  ".join(lines)
            )

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._parts[name][0].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self._leaves[self._parts[name][1]].dtype

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return KINDS.get(self.dtype(name).name, self.dtype(name).name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        return np.ascontiguousarray(self._view(name)).reshape(self.shape(name))

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return rows_of_view(self._view(name), self.shape(name), rows)

    def _view(self, name: str) -> np.ndarray:
        part, path = self._parts[name]
        return part.view(self._leaf(path))

    def _leaf(self, path: Keys) -> np.ndarray:
        return np.asarray(leaf(self._params, path))


class CheckpointSource(TreeSource):
    """A checkpoint of dflash_jax, whose arrays are read when they are needed."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._describe(checkpoint.leaves, checkpoint.config)
        self._arrays = RecentArrays(checkpoint.leaves, self._read)
        self._verified = False

    def _leaf(self, path: Keys) -> np.ndarray:
        return self._arrays[path]

    def _read(self, paths: list[Keys]) -> dict[Keys, np.ndarray]:
        if not self._verified:
            self.checkpoint.verify()
            self._verified = True
        return self.checkpoint.read(paths)


K = TypeVar("K")


class RecentArrays(Generic[K]):
    """Arrays of files that are read in batches of neighbours; those used last are in memory.

    Args:
      leaves: all arrays, in the order in which they are likely to be used.
      read: returns arrays by name.
      keep_all: whether none is dropped.
    """

    def __init__(
        self,
        leaves: Mapping[K, Leaf],
        read: Callable[[list[K]], Mapping[K, np.ndarray]],
        *,
        keep_all: bool = False,
    ):
        self._batches = {name: batch for batch in batches(leaves) for name in batch}
        self._read = read
        self._keep_all = keep_all
        self._recent: collections.OrderedDict[K, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, name: K) -> bool:
        return name in self._batches

    def __getitem__(self, name: K) -> np.ndarray:
        with self._lock:
            if name not in self._recent:
                batch = self._batches[name]
                missing = [each for each in batch if each not in self._recent]
                self._make_room()
                self._recent.update(self._read(missing))
            self._recent.move_to_end(name)
            return self._recent[name]

    def _make_room(self) -> None:
        size = sum(array.nbytes for array in self._recent.values())
        while not self._keep_all and size > BATCH:
            _, array = self._recent.popitem(last=False)
            size -= array.nbytes


def leaf(params: Any, path: Keys) -> Any:
    """Return the leaf of a tree, or None."""
    for key in path:
        if not isinstance(params, dict) or key not in params:
            return None
        params = params[key]
    return params


def _described(array: Any) -> Leaf:
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    return Leaf(tuple(array.shape), np.dtype(array.dtype))
