"""Orbax checkpoints of MaxText and other Flax libraries, as sources of tensors.

The user puts config.json and the tokenizer's files, as Hugging Face spells them, into the folder of
the checkpoint: these libraries keep neither with the weights.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint import Keys, LazyArray, Leaf, read_arrays, read_leaves, write_arrays
from dflash_jax.converters.formats.source import Rows, as_rows
from dflash_jax.converters.names import flax
from dflash_jax.converters.tree_source import KINDS, RecentArrays, leaf
from dflash_jax.errors import CheckpointError

METADATA = "_METADATA"  # file that is in every folder of arrays by orbax
# Where checkpoint managers put arrays.
ITEMS = ("", "items", "default", "params", "state", "model_params")
# By library, where its own manager looks for the arrays of step 0, and the path of one of them.
PLACES = {"maxtext": ("0/items", "params/params/{}"), "tunix": ("0/model_params", "{}/value")}
VALUE = "/value"  # ends the path of a variable of Flax NNX


def find(path: Path) -> Path | None:
    """Return the folder of arrays at or below a path: that of the last step, if it has several.

    Folders with safetensors files have none.
    """
    if any(path.glob("*.safetensors")):
        return None
    for folder in (path, *(path / str(step) for step in reversed(steps(path)))):
        for item in ITEMS:
            if (folder / item / METADATA).is_file():
                return folder / item
    return None


def steps(path: Path) -> list[int]:
    """Return the numbers of the steps whose checkpoints are in a folder."""
    if not path.is_dir():
        return []
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and p.is_dir())


class OrbaxSource:
    """A `TensorSource` over the arrays of a folder, by path.

    Parameters are read in batches when they are needed, see `RecentArrays`.
    """

    def __init__(self, path: Path, folder: Path):
        self.path = path
        self._folder = folder
        try:
            leaves = read_leaves(folder)
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise _unreadable(folder, error) from error
        names = {keys: "/".join(keys).removesuffix(VALUE) for keys in leaves}
        self._keys: dict[str, Keys] = {name: keys for keys, name in names.items()}
        self._leaves: Mapping[str, Leaf] = {names[keys]: x for keys, x in leaves.items()}
        known = flax.find_library(self._leaves)
        if known is None:
            names = ", ".join(library.name for library in flax.LIBRARIES.values())
            held = ", ".join(list(self._leaves)[:4])
            raise CheckpointError(
                f"{path} is an orbax checkpoint of none of {names}: it holds {held}, ..."
            )
        self.written_by, prefix = known
        own = {name: leaf for name, leaf in self._leaves.items() if name.startswith(prefix)}
        # Each layer is in all arrays of stacked layers.
        stacked = any("layers/" in name and not re.search(r"layers_?/?\d", name) for name in own)
        self._arrays = RecentArrays(own, self._read, keep_all=stacked)

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self._leaves)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._leaves[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self._leaves[name].dtype

    def kind(self, name: str) -> str:
        """Return the stored type, as safetensors spells it."""
        return KINDS.get(self.dtype(name).name, self.dtype(name).name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor.

        Raises:
          CheckpointError: the files are damaged.
        """
        if name in self._arrays:
            return self._arrays[name]
        return self._read([name])[name]  # an array of an optimizer's state

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return as_rows(self.read(name))[rows]

    def _read(self, names: list[str]) -> dict[str, np.ndarray]:
        try:
            wanted = {self._keys[name]: None for name in names}
            tree: Any = read_arrays(self._folder, wanted, partial=True)
        except Exception as error:
            raise _unreadable(self._folder, error) from error
        return {name: np.asarray(leaf(tree, self._keys[name])) for name in names}


def write(place: Path, naming: str, arrays: Mapping[str, LazyArray]) -> None:
    """Write arrays by path into a new folder, where the library of that naming reads them."""
    where, spelt = PLACES[naming.removesuffix("_scanned")]
    (place / where).parent.mkdir(parents=True)
    keyed = {tuple(spelt.format(path).split("/")): array for path, array in arrays.items()}
    write_arrays(place / where, keyed)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0][:200]
    return CheckpointError(f"{folder} cannot be read ({reason}); copy the checkpoint again")
