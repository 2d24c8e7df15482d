"""Parameters in the memory of another library, under its names, as parameter trees and back.

Names are Hugging Face's, or those of Tunix's Flax NNX modules for Llama 3, Qwen 2 and Qwen 3, of
google-tunix 0.1.7: layers are numbered in a list, and projections are [in, heads, width].
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.converters import families
from dflash_jax.converters.canonical import Canonical, Origin
from dflash_jax.converters.load import Params, load
from dflash_jax.converters.names import huggingface
from dflash_jax.converters.source import Rows, as_rows
from dflash_jax.converters.tree_source import KINDS, TreeSource
from dflash_jax.errors import CheckpointError

Naming = Literal["huggingface", "tunix"]
# Tunix's paths by patterns of canonical names. Matrices [out, in] are transposed.
TUNIX = {
    r"embed_tokens\.weight": "embedder/input_embedding",
    r"lm_head\.weight": "lm_head/w",
    r"norm\.weight": "final_norm/w",
    r"layers\.(\d+)\.self_attn\.([qkvo]_proj|[qk]_norm)\.weight": r"layers/\1/attn/\2/w",
    r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight": r"layers/\1/mlp/\2_proj/kernel",
    r"layers\.(\d+)\.(input|post_attention)_layernorm\.weight": r"layers/\1/\2_layernorm/w",
}
TABLE = "embed_tokens.weight"


class NamedArrays:
    """A `TensorSource` over arrays in memory."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays

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
        """Return a whole array."""
        return np.ascontiguousarray(self._arrays[name])

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return as_rows(self.read(name))[rows]


def from_arrays(arrays: Any, config: TargetConfig, *, dtype: str = "float32") -> Params:
    """Return the parameter tree of a target from another library's parameters.

    `Engine.update_params({"target": ...})` takes it.

    Args:
      arrays: arrays by Hugging Face's names, or an NNX state of Tunix, as `nnx.state(model)` or
        `nnx.to_pure_dict` returns it.
      config: the target's, as in `engine.graph.config`.
      dtype: float32, bfloat16 or float16.

    Raises:
      CheckpointError: parameters are missing, unknown or of another shape, or not finite.
      ConfigError: the dtype is unknown.
    """
    leaves = dict(_leaves(arrays))
    if wrong := [name for name, leaf in leaves.items() if not hasattr(leaf, "dtype")]:
        raise CheckpointError(f"{wrong[0]} is no array; give arrays by name, or an NNX state")
    if "embedder/input_embedding" in leaves:
        source = NamedArrays(_from_tunix(leaves, config))
        found = Canonical(source, {name: Origin(name) for name in source.names()}, {})
    else:
        tied, folder = config.tie_embeddings, families.folder(config)
        found = huggingface.target(NamedArrays(leaves), tied=tied, folder=folder)
    return load(found, config, dtype, where="the arrays that were given")


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
        `nnx.replace_by_pure_dict` puts into a state.

    Raises:
      CheckpointError: the parameters do not fit the config, or Tunix has no name for one of them.
    """
    source = TreeSource(params, config)
    if naming == "huggingface":
        outside = ("lm_head.weight",)
        return {x if x in outside else f"model.{x}": source.read(x) for x in source.names()}
    root: dict[Any, Any] = {}
    for name in source.names():
        *path, last = (int(key) if key.isdigit() else key for key in _tunix_path(name).split("/"))
        node = root
        for key in path:
            node = node.setdefault(key, {})
        node[last] = _to_tunix(name, source.read(name), config)
    return root


def _tunix_path(name: str) -> str:
    for pattern, path in TUNIX.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(path)
    raise CheckpointError(f"Tunix has no name for {name}; its Llama 3 and Qwen 3 can be converted")


def _from_tunix(leaves: Mapping[str, Any], config: TargetConfig) -> dict[str, Any]:
    """Return arrays in Hugging Face's form by canonical name, and others by their own."""
    parts = {part.name: part for slot in families.slots(config) for part in slot.parts}
    found, rest = {}, dict(leaves)
    for name, part in parts.items():
        array = rest.pop(_tunix_path(name), None)
        if array is None:
            continue
        array = np.asarray(array)
        turned = array.ndim > 1 and name != TABLE and array.size == np.prod(part.shape)
        found[name] = array.reshape(part.shape[::-1]).T if turned else array
    return found | rest


def _to_tunix(name: str, array: np.ndarray, config: TargetConfig) -> np.ndarray:
    """Return an array in Tunix's form."""
    if array.ndim < 2 or name == TABLE:
        return array
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    turned = np.ascontiguousarray(array.T)
    if found := re.search(r"\.([qkv])_proj\.", name):
        return turned.reshape(len(turned), heads[found[1]], config.head_dim)
    if ".o_proj." in name:
        return turned.reshape(config.num_heads, config.head_dim, -1)
    return turned
