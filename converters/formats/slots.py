"""Name tables: parameters, and the canonical tensors that fill them.

Canonical names and shapes are the Hugging Face ones without the leading "model.". Each part
of a parameter is a view of its array, so that one description serves loading and export.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
        """Return the part of `parameter` that this tensor fills, in the tensor's order."""
        return parameter.transpose(self.axes)[self.select]


@dataclass(frozen=True)
class Slot:
    """A parameter: its path in the tree, its shape, and the tensors that fill it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    integer: bool = False  # integers, whatever the dtype of the weights
    stack: bool = False  # whether it is a stack [E, D, ...] of experts' matrices


Keys = tuple[str, ...]


@dataclass(frozen=True)
class Folder:
    """Differences of a family's folders from its canonical tensors, as name patterns."""

    ignored: Mapping[str, str] = field(default_factory=dict)  # and the reasons
    fused: str | None = None  # experts stored as gate_up_proj [E, 2F, D] and down_proj [E, D, F]
    # The rows of each part of a stored tensor, by canonical name.
    split: Callable[[str], Mapping[str, range | np.ndarray]] | None = None


def same(path: Keys, name: str, *shape: int) -> Slot:
    """Return a parameter in its tensor's form: norms, biases, embedding tables."""
    return Slot(path, shape, (TensorPart(name, shape, tuple(range(len(shape)))),))


def integers(path: Keys, name: str, *shape: int) -> Slot:
    """Return an integer parameter in its tensor's form: token ids."""
    return dataclasses.replace(same(path, name, *shape), integer=True)


def linear(path: Keys, name: str, out: int, into: int) -> Slot:
    """Return a weight [in, out] from a tensor [out, in]."""
    return Slot(path, (into, out), (TensorPart(name, (out, into), (1, 0)),))


def paired(path: Keys, names: tuple[str, str], out: int, into: int) -> Slot:
    """Return a weight [in, 2, out] from two tensors [out, in]."""
    parts = tuple(TensorPart(n, (out, into), (1, 2, 0), (i,)) for i, n in enumerate(names))
    return Slot(path, (into, 2, out), parts)


def by_head(path: Keys, names: tuple[str, ...], heads: tuple[int, ...], *rest: int) -> Slot:
    """Return a fused parameter: per key/value head its query heads, its key and its value.

    The parameter is [(D,) K, sum(heads), H].

    Args:
      heads: for each tensor, its heads in one of the K groups.
      rest: (groups K, head width H) for biases, (K, H, input width D) for weights.
    """
    groups, width, *into = rest
    weight = len(into) == 1
    shape = (*into, groups, sum(heads), width)
    axes = (1, 2, 3, 0) if weight else (0, 1, 2)
    parts = []
    start = 0
    for name, count in zip(names, heads, strict=True):
        select = (slice(None), slice(start, start + count))
        parts.append(TensorPart(name, (groups * count * width, *into), axes, select))
        start += count
    return Slot(path, shape, tuple(parts))
