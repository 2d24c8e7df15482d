"""A parameter tree as canonical tensors, for export and comparison."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoint import Checkpoint, Keys, Leaf, Params
from dflash_jax.config import AttentionConfig
from dflash_jax.converters import families
from dflash_jax.converters.names.slots import TensorPart
from dflash_jax.converters.source import Rows, rows_of_view
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
        slots = families.slots(config)
        found = {slot.path: leaf(params, slot.path) for slot in slots}
        self._describe({path: _described(x) for path, x in found.items() if x is not None}, config)

    def _describe(self, leaves: Mapping[Keys, Leaf], config: AttentionConfig) -> None:
        self._parts: dict[str, tuple[TensorPart, Keys]] = {}
        self._leaves = leaves
        lines = []
        for slot in families.slots(config):
            found = leaves.get(slot.path)
            if found is None or found.shape != slot.shape:
                said = "missing" if found is None else f"of shape {list(found.shape)}"
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
        return part.view(np.asarray(leaf(self._tree(), path)))

    def _tree(self) -> Params:
        return self._params


class CheckpointSource(TreeSource):
    """A checkpoint of dflash_jax; reading the first tensor reads all of it."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._describe(checkpoint.leaves, checkpoint.config)
        self._read = functools.cache(checkpoint.load)

    def _tree(self) -> Params:
        return self._read()


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
