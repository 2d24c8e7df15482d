"""The vocabulary of name tables: parameters, and the canonical tensors that fill them.

Canonical names and shapes are the Hugging Face ones without the leading "model.". Each part
of a parameter is a view of its array, so that one description serves loading and export.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Index = tuple[int | slice, ...]
STACKED = r"\.mlp\.experts\.(gate_up|down)_proj$"  # all experts of a layer in one tensor


@dataclass(frozen=True)
class TensorPart:
    """A canonical tensor, and the view of the parameter it fills.

    The view is `parameter.transpose(axes)[select]`; flattened it has the tensor's `shape`.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    select: Index = ()

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The part of `parameter` this tensor fills, in the tensor's own order."""
        return parameter.transpose(self.axes)[self.select]


@dataclass(frozen=True)
class Slot:
    """A parameter: its place in the tree, its shape, and the tensors that fill it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    integer: bool = False  # whole numbers, whatever dtype the weights get


Keys = tuple[str, ...]


@dataclass(frozen=True)
class Folder:
    """How a family's folders differ from its canonical tensors, as patterns of their names."""

    ignored: Mapping[str, str] = field(default_factory=dict)  # and why they are not needed
    fused: str | None = None  # experts stored as gate_up_proj [E, 2F, D] and down_proj [E, D, F]


def same(path: Keys, name: str, *shape: int) -> Slot:
    """A parameter stored as its tensor is: norms, biases, embedding tables."""
    return Slot(path, shape, (TensorPart(name, shape, tuple(range(len(shape)))),))


def integers(path: Keys, name: str, *shape: int) -> Slot:
    """A parameter of whole numbers, stored as its tensor is: token ids."""
    return dataclasses.replace(same(path, name, *shape), integer=True)


def linear(path: Keys, name: str, out: int, into: int) -> Slot:
    """A weight [in, out] from a tensor [out, in]."""
    return Slot(path, (into, out), (TensorPart(name, (out, into), (1, 0)),))


def paired(path: Keys, names: tuple[str, str], out: int, into: int) -> Slot:
    """A weight [in, 2, out] from two tensors [out, in]."""
    parts = tuple(TensorPart(n, (out, into), (1, 2, 0), (i,)) for i, n in enumerate(names))
    return Slot(path, (into, 2, out), parts)


def by_head(path: Keys, names: tuple[str, ...], heads: tuple[int, ...], *rest: int) -> Slot:
    """Per key/value head: the query heads it serves, then its key, then its value.

    `heads` counts for each tensor its heads in one group; `rest` is (groups K, head width H)
    for biases and (K, H, input width D) for weights. The parameter is [(D,) K, sum(heads), H].
    """
    groups, width, *into = rest
    weight = len(into) == 1
    shape = (*into, groups, sum(heads), width)
    axes = (1, 2, 3, 0) if weight else (0, 1, 2)
    parts, start = [], 0
    for name, count in zip(names, heads, strict=True):
        select = (slice(None), slice(start, start + count))
        parts.append(TensorPart(name, (groups * count * width, *into), axes, select))
        start += count
    return Slot(path, shape, tuple(parts))
