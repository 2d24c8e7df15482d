"""Memory layouts of weights, and packing them with NumPy. `formats` describes the formats."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.quant.formats import E2M1, KINDS, RUN, Spec

Arrays = dict[str, Any]  # NumPy or JAX arrays


FLOAT = ""  # the kind of a part that is not packed
QUANTISED = {"int8": "int8", "int4": "Q4_0"}  # kind for each value of `Plan.weights`

# Forms that weights are declared to have, see `nn.layers.matrix`; others are `FLOAT`.
MATRIX = "matrix"  # multiplied by `nn.layers.dot`
HEAD = "head"  # a matrix that is never packed in 4 bits, which would change close decisions
TABLE = "table"  # gathered from; packed only if the file has it packed
ROUTER = "router"  # a matrix that chooses experts; packed only if the file has it packed
STACK = "stack"  # a stack of experts' matrices [E, D, ...]
# Forms of matrices [D, ...], which native kernels interleave column by column.
LAID_OUT = frozenset([MATRIX, HEAD, TABLE, ROUTER])


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight. Its arrays are [rows along D, N], with N the product of the other axes."""

    arrays: Arrays
    kind: str
    shape: tuple[int, ...]  # shape of the weight
    kernel: bool = False  # whether a GPU multiplies by the Pallas kernel


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """A weight in strips of 16 columns, for the native kernels.

    `kernels.native.interleaved` describes the arrays; floats are an array `values` [strips, D, 16].
    Those of a stack [E, D, ...] have the axis E in front.
    """

    arrays: Arrays
    kind: str  # FLOAT if it is not packed
    shape: tuple[int, ...]  # shape of the weight
    by_floats: bool = False  # whether int8 codes are multiplied by activations in float
    stacked: bool = False  # whether it is a stack

    def expert(self, i: int) -> "Interleaved":
        """Return a matrix of a stack; its arrays are views."""
        assert self.stacked
        return Interleaved({n: a[i] for n, a in self.arrays.items()}, self.kind, self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a float weight [D, ...], or a stack of these."""
        assert self.kind == FLOAT, self.kind
        if self.stacked:
            each = [np.asarray(self.expert(i)) for i in range(self.shape[0])]
            return np.array(np.stack(each), dtype, copy=copy)
        rows = np.asarray(self.arrays["values"]).swapaxes(0, 1).reshape(self.shape[0], -1)
        return np.array(rows[:, : math.prod(self.shape[1:])].reshape(self.shape), dtype, copy=copy)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A weight [D, ...] whose parts along one axis have different kinds, or are not packed."""

    parts: tuple[Any, ...]
    axis: int
    shape: tuple[int, ...]


StructuredWeight = Packed | Interleaved | Joined  # weights that are not one array


def spec(weights: str, role: str, form: str, shape: tuple[int, ...]) -> Spec | None:
    """Return how int8 or int4 weights pack a parameter, or None if it stays as it is.

    Head and drafter are int8 in both cases: they are small compared with the layers.

    Args:
      weights: the value of `Plan.weights`.
      role: role of its model, "target" or "drafter".
      form: that it was declared to have.
    """
    if weights not in QUANTISED or form not in (MATRIX, HEAD):
        return None
    light = role == "drafter" or form == HEAD
    kind = "int8" if light else QUANTISED[weights]
    kind = kind if fits(kind, shape[0]) else "int8"
    return 1, ((kind, shape[1]),)


def fits(kind: str, depth: int) -> bool:
    """Whether weights of this kind can be contracted over `depth` numbers."""
    return depth % KINDS[kind].unit == 0


def quantise(weight: np.ndarray, kind: str) -> Arrays:
    """Pack float weights [D, ...] as int8 or Q4_0, each rounded to the nearest code.

    As in ggml, the Q4_0 code without a positive counterpart, -8, represents the weight of a group
    with the largest magnitude, whatever its sign.

    Raises:
      ValueError: another kind is given.
    """
    w = np.asarray(weight, np.float32)
    if kind == "int8":
        scale = np.abs(w).max(axis=0, keepdims=True) / np.float32(127)
        codes = np.rint(w / np.where(scale == 0, np.float32(1), scale))
        return {"codes": codes.astype(np.int8), "scale": scale}
    if kind != "Q4_0":
        raise ValueError(f"weights are quantised to int8 or Q4_0, not to {kind}")
    groups = w.reshape(-1, RUN, *w.shape[1:])
    at = np.abs(groups).argmax(axis=1, keepdims=True)
    scale = (np.take_along_axis(groups, at, axis=1) / np.float32(-8)).astype(np.float16)
    divisor = np.where(scale == 0, np.float32(1), scale.astype(np.float32))
    codes = np.clip(np.rint(groups / divisor) + 8, 0, 15).astype(np.uint8)
    return {"codes": join(codes.reshape(w.shape), 2), "scale": scale[:, 0]}


def pack(weight: np.ndarray, how: Spec) -> Packed:
    """Return a float weight [D, ...] packed as the single part of a specification."""
    (kind, _), *_ = how[1]
    columns = np.asarray(weight).reshape(len(weight), -1)
    return Packed(quantise(columns, kind), kind, weight.shape)


def pack_tree(params: Mapping[str, Any], specs: Mapping[str, Spec], at: str = "") -> dict[str, Any]:
    """Return a parameter tree with the specified leaves packed; paths begin with the role."""
    packed: dict[str, Any] = {}
    for name, leaf in params.items():
        path = f"{at}{name}"
        if isinstance(leaf, Mapping):
            packed[name] = pack_tree(leaf, specs, path + "/")
        elif path in specs:
            packed[name] = pack(leaf, specs[path])
        else:
            packed[name] = leaf
    return packed


def dequantise(arrays: Mapping[str, np.ndarray], kind: str) -> np.ndarray:
    """Return float32 weights [D, ...]; the reference for products with packed weights."""
    k = KINDS[kind]
    codes = arrays["codes"]
    if k.classes > 1:
        codes = split(codes, 2)
    if k.high:
        codes = codes | split(arrays["high"], 4) << 4
    w = np.array(E2M1, np.int8)[codes] if k.floats else codes
    w = w.astype(np.float32) - np.float32(k.zero)
    if k.zeros:
        w -= _spread(arrays["zero"].astype(np.float32), len(w))
    scale = _spread(arrays["scale"].astype(np.float32), len(w))
    if k.sub:
        scale = scale * _spread(arrays["sub"].astype(np.float32), len(w))
    w *= scale
    if "low" in arrays:
        low = _spread(arrays["low"].astype(np.float32), len(w))
        w -= low * _spread(arrays["sub_low"].astype(np.float32), len(w)) if k.sub else low
    return w


def join(codes: np.ndarray, classes: int) -> np.ndarray:
    """Return codes [D, ...] of 8 / classes bits as bytes [D / classes, ...]."""
    parts = codes.reshape(-1, classes, RUN, *codes.shape[1:])
    bits = 8 // classes
    joined = parts[:, 0].copy()
    for i in range(1, classes):
        joined |= parts[:, i] << np.uint8(bits * i)
    return joined.reshape(-1, *codes.shape[1:])


def split(packed: np.ndarray, classes: int) -> np.ndarray:
    """Return the codes [D, ...] that `join` put into bytes."""
    parts = packed.reshape(-1, RUN, *packed.shape[1:])
    bits = 8 // classes
    mask = np.uint8((1 << bits) - 1)
    codes = np.stack([parts >> np.uint8(bits * i) & mask for i in range(classes)], axis=1)
    return codes.reshape(-1, *packed.shape[1:])


def _spread(groups: np.ndarray, depth: int) -> np.ndarray:
    return np.repeat(groups, depth // len(groups), axis=0)
