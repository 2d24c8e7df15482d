"""A parameter tree seen as canonical tensors, for export and comparison."""

from typing import Any

import numpy as np

from converters import names
from converters.names.slots import Part
from converters.source import Rows, as_rows
from dflash_jax.config import AttentionConfig
from dflash_jax.errors import CheckpointError

KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class TreeSource:
    """See `converters.source.TensorSource`; leaves are NumPy arrays or convert to them."""

    def __init__(self, params: dict[str, Any], config: AttentionConfig):
        self._parts: dict[str, tuple[Part, np.ndarray]] = {}
        lines = []
        for slot in names.slots(config):
            leaf = _leaf(params, slot.path)
            if leaf is None or leaf.shape != slot.shape:
                found = "missing" if leaf is None else f"of shape {list(leaf.shape)}"
                lines.append(f"{'/'.join(slot.path)} is {found}, expected {list(slot.shape)}")
                continue
            self._parts.update({part.name: (part, leaf) for part in slot.parts})
        if lines:
            raise CheckpointError(
                "the parameters do not fit their configuration; give the two that belong"
                " together\n  " + "\n  ".join(lines)
            )

    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name][0].shape

    def dtype(self, name: str) -> np.dtype:
        return self._parts[name][1].dtype

    def kind(self, name: str) -> str:
        return KINDS.get(self.dtype(name).name, self.dtype(name).name)

    def nbytes(self, name: str) -> int:
        return int(np.prod(self.shape(name))) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        part, leaf = self._parts[name]
        return np.ascontiguousarray(part.view(leaf)).reshape(part.shape)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        return as_rows(self.read(name))[rows]


def _leaf(params: Any, path: tuple[str, ...]) -> np.ndarray | None:
    for key in path:
        if not isinstance(params, dict) or key not in params:
            return None
        params = params[key]
    return np.asarray(params)
