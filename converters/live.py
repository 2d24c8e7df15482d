"""Parameters in the memory of another library, under its names, as parameter trees and back.

Names are Hugging Face's, or those of a Flax library (`names/flax.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_jax import families
from dflash_jax.config import TargetConfig
from dflash_jax.converters import adapter
from dflash_jax.converters.formats.source import Rows, as_rows
from dflash_jax.converters.load import Params, load
from dflash_jax.converters.names import flax, huggingface
from dflash_jax.converters.tree_source import KINDS, TreeSource
from dflash_jax.errors import CheckpointError

Naming = Literal["gemma", "huggingface", "maxtext", "maxtext_scanned", "tunix"]
WHERE = "the arrays that were given"


class NamedArrays:
    """A `TensorSource` over arrays in memory."""

    path = WHERE

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays
        self._read: dict[str, np.ndarray] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names."""
        return tuple(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return np.dtype(self._arrays[name].dtype)

    def kind(self, name: str) -> str:
        """Return the dtype, as safetensors spells it."""
        return KINDS.get(self.dtype(name).name, self.dtype(name).name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes."""
        return self._arrays[name].nbytes

    def read(self, name: str) -> np.ndarray:
        """Return a whole array, copied from its device once."""
        if name not in self._read:
            self._read[name] = np.ascontiguousarray(self._arrays[name])
        return self._read[name]

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return as_rows(self.read(name))[rows]


def from_arrays(
    arrays: Any,
    config: TargetConfig,
    *,
    dtype: str = "float32",
    lora: str | Path | tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> Params:
    """Return the parameter tree of a target from another library's parameters.

    `Engine.update_params({"target": ...})` takes it.

    Args:
      arrays: arrays by Hugging Face's names; an NNX state of Tunix or MaxText, as
        `nnx.state(model)` or `nnx.to_pure_dict` returns it; or variables of a Linen
        module of MaxText or Gemma's library.
      config: the target's, as in `engine.graph.config`.
      dtype: float32, bfloat16 or float16.
      lora: a PEFT adapter that is added: its folder, or the fields of its adapter_config.json and
        its arrays by PEFT's names.

    Raises:
      CheckpointError: parameters are missing, unknown or of another shape, or not finite, or the
        adapter is of another model.
      ConfigError: the dtype is unknown, the library has no such family, or the adapter is of a kind
        that is not supported.
    """
    leaves = dict(_leaves(arrays))
    if known := flax.find_library(leaves):
        leaves = {name: leaf for name, leaf in leaves.items() if name.startswith(known[1])}
    if wrong := [name for name, leaf in leaves.items() if not hasattr(leaf, "dtype")]:
        raise CheckpointError(f"{wrong[0]} is no array; give arrays by name, or an NNX state")
    source = NamedArrays(leaves)
    tensors = flax.target(source, config, where=WHERE)
    if tensors is None:
        folder = families.folder(config)
        tensors = huggingface.target(source, tied=config.tie_embeddings, folder=folder)
    if isinstance(lora, tuple):
        fields, factors = lora
        tensors, _ = adapter.merged_arrays(tensors, fields, NamedArrays(dict(_leaves(factors))))
    elif lora is not None:
        tensors, _ = adapter.merged(tensors, Path(lora))
    return load(tensors, config, dtype, where=WHERE)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists by path, variables of NNX as their values."""
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, inner in items:
            yield from _leaves(inner, f"{path}/{key}" if path else str(key))
    else:
        yield path, tree.get_value() if hasattr(tree, "get_value") else tree


def to_arrays(params: Params, config: TargetConfig, *, naming: Naming) -> dict[str, Any]:
    """Return a target's parameters under another library's names; the inverse of `from_arrays`.

    Args:
      params: a tree of floats, in any float layout, as `engine.params["target"]`.
      naming: "huggingface" for a flat dict; "tunix" for nested ones, which
        `nnx.replace_by_pure_dict` puts into a state; "maxtext" or "maxtext_scanned" for the
        variables of its Linen module, with single or stacked layers; "gemma" for the parameters
        of that of Gemma's library.

    Raises:
      CheckpointError: the parameters do not fit the config, or the library has no name for one.
      ConfigError: the library has no such family.
    """
    source = TreeSource(params, config)
    if naming == "huggingface":
        outside = ("lm_head.weight",)
        return {x if x in outside else f"model.{x}": source.read(x) for x in source.names()}
    dtypes = {name: source.dtype(name) for name in source.names()}

    def fill(name: str, view: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> None:
        view[...] = change(source.read(name)).reshape(view.shape)

    arrays = flax.arrays_of(fill, dtypes, config, naming)
    root = nested({path: array.make() for path, array in arrays.items()})
    return {"params": root} if naming.startswith("maxtext") else root


def nested(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the tree of leaves by paths like "layers/0/attn/w"; keys of digits are numbers."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        node = root
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root
