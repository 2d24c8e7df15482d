"""Write .safetensors files tensor by tensor; the same tensors give the same bytes."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.converters.safetensors import DTYPES

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, tensors: Sequence[Planned], read: Callable[[Planned], np.ndarray]
) -> None:
    """Write one file; `read` is called for each tensor in turn, so that one is in memory."""
    entries, position = {}, 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(flat_bytes(read(tensor)).data)


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the row-major bytes of an array, uint8 [bytes]; a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
