"""Importance matrices of targets: inputs of parameters by the names of matrices in GGUF files."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dflash_jax import families
from dflash_jax.config import TargetConfig
from dflash_jax.converters.formats.canonical import Canonical
from dflash_jax.converters.gguf.export import as_gguf
from dflash_jax.converters.gguf.importance import MeasuredInputs
from dflash_jax.converters.load import tree
from dflash_jax.converters.tree_source import TreeSource


class Text(NamedTuple):
    """A text, of which `chunks` pieces of `chunk` tokens were run."""

    name: str
    chunks: int
    chunk: int


def by_stored_name(
    config: TargetConfig, inputs: Mapping[str, tuple[np.ndarray, np.ndarray]], text: Text
) -> MeasuredInputs:
    """Return sums of squares by the names of matrices in GGUF files, columns in their order.

    They are read off a model whose weights are the sums of their inputs, and off one whose weights
    are the numbers of tokens, so that they go through what files change.

    Args:
      inputs: sums, [D] or [E, D], and numbers of tokens, [] or [E], by path of the parameter.

    Raises:
      ConfigError: the target has no form in GGUF.
    """
    squares = _stored(config, {path: sums for path, (sums, _) in inputs.items()})
    tokens = _stored(config, {path: counts for path, (_, counts) in inputs.items()})
    sums = {}
    counts = {}
    for name in squares.names():
        *stack, height, _ = (1, *squares.shape(name))
        if len(squares.shape(name)) < 2 or not name.startswith("blk."):
            continue
        firsts = np.arange(math.prod(stack)) * height  # the first row of each matrix
        counted = tokens.read_rows(name, firsts)[:, :1]
        if counted.any():
            sums[name] = squares.read_rows(name, firsts)
            counts[name] = counted
    return MeasuredInputs(sums, counts, text.name, text.chunks, text.chunk)


def _stored(config: TargetConfig, numbers: Mapping[str, np.ndarray]) -> Canonical:
    """Return the tensors of a file whose parameters are `numbers`, repeated over other axes."""
    leaves: dict[tuple[str, ...], Any] = {}
    for slot in families.slots(config):
        own = np.asarray(numbers.get("/".join(slot.path), 0), np.float32)
        wide = own.reshape(*own.shape, *[1] * (len(slot.shape) - own.ndim))
        leaves[slot.path] = np.broadcast_to(wide, slot.shape)
    return as_gguf(config, TreeSource(tree(leaves), config), "f32").tensors
