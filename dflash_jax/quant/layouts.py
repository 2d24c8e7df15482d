"""How packed weights lie in memory, and how they get there; NumPy alone.

A packed weight [D, N] is multiplied as x · w: D is contracted. Along D it is cut into runs of
32; `classes` neighbouring runs share bytes, in which each has bits of its own, so that a kernel
takes whole rows of bytes apart with a mask and a shift. All groups lie along D:

| kind | bits per weight | a weight is | groups along D |
| --- | --- | --- | --- |
| int8 | 8 | scale · q | one scale for all |
| Q8_0 | 8.5 | scale · q | 32 |
| Q4_0, int4 | 4.5 | scale · (q - 8) | 32 |
| Q4_K | 4.625 | scale · sub · q - low · sub_low | 32 in 256 |
| Q6_K | 6.5625 | scale · sub · (q - 32) | 16 in 256 |

The last four hold exactly the numbers of the ggml blocks of that name; only Q4_K's six-bit
scales take a byte each here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

RUN = 32
PANEL = 16  # columns side by side
FEW = 32  # tokens at most that are multiplied by panels
BROAD = 4096  # columns above which panels gain nothing
Arrays = dict[str, Any]  # of NumPy or JAX


@dataclasses.dataclass(frozen=True)
class Kind:
    """A packed format.

    Attributes:
      classes: runs that share bytes.
      zero: what is subtracted from a code.
      group: weights along D that share a scale; 0 is all of them.
      sub: weights along D that share a scale within a group; 0 is no such scales.
      high: whether two high bits of each code lie in bytes of their own.
    """

    name: str
    classes: int
    zero: int
    group: int
    sub: int = 0
    high: bool = False

    @property
    def spread(self) -> int:
        """Rows of D in one row of `codes`."""
        return min(self.classes, 2)

    @property
    def unit(self) -> int:
        """What D must be a multiple of."""
        return max(self.group, RUN * self.classes)

    def arrays(self, depth: int) -> dict[str, tuple[int, str]]:
        """Each array's rows along D and its dtype."""
        found = {
            "codes": (depth // self.spread, "int8" if self.classes == 1 else "uint8"),
            "scale": (depth // self.group, "float16") if self.group else (1, "float32"),
        }
        if self.high:
            found["high"] = (depth // 4, "uint8")
        if self.sub:
            found["sub"] = (depth // self.sub, "int8" if self.high else "uint8")
        if self.name == "Q4_K":
            found |= {"low": found["scale"], "sub_low": found["sub"]}
        return found


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("int8", classes=1, zero=0, group=0),
        Kind("Q8_0", classes=1, zero=0, group=32),
        Kind("Q4_0", classes=2, zero=8, group=32),
        Kind("Q4_K", classes=2, zero=0, group=256, sub=32),
        Kind("Q6_K", classes=4, zero=32, group=256, sub=16, high=True),
    )
}
FLOAT = ""  # the kind of what is not packed
STORED = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")  # those that files hold
QUANTISED = {"int8": "int8", "int4": "Q4_0"}  # what `Plan.weights` turns weights into


# Matrices that are multiplied through `nn.layers.dot`; everything else stays as it is.
MATRICES = frozenset(["qkv", "q", "kv", "o", "gate_up", "down", "in_proj", "out", "fc", "head"])
TABLE = "embed"  # is gathered from, and packed only where a file keeps it so
# Of a weight [D, ...]: an axis, and the kind and width of its parts along that axis.
Spec = tuple[int, tuple[tuple[str, int], ...]]
Stored = tuple[tuple[str, Spec], ...]  # by path, the role in front


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight; arrays are [rows along D, N], N the product of the other axes."""

    arrays: Arrays
    kind: str
    shape: tuple[int, ...]  # of the weight
    kernel: bool = False  # multiply by the Pallas kernel on a GPU


@dataclasses.dataclass(frozen=True)
class Joined:
    """A weight [D, ...] whose parts along one axis are packed differently, or not at all."""

    parts: tuple[Any, ...]
    axis: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A float weight [D, ...] kept as [..., D], so that it can come first in its products."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *columns, depth = self.array.shape
        return depth, *columns

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The weight [D, ...]."""
        return np.array(np.moveaxis(np.asarray(self.array), -1, 0), dtype, copy=copy)


@dataclasses.dataclass(frozen=True)
class Panels:
    """A small float weight [D, ...] kept twice: as it is, and as panels [P, D, PANEL].

    Panels have neighbouring columns side by side, as libraries order a weight before they multiply;
    the last one is filled up with zeros. They are for the few tokens of a block.
    """

    whole: Any
    panels: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.whole.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The weight [D, ...]."""
        return np.array(self.whole, dtype, copy=copy)


ORDERED = Transposed | Panels
KEPT = Packed | Joined | ORDERED  # weights that are more than an array


def order_of(order: str, shape: tuple[int, ...]) -> type[ORDERED] | None:
    """How a plan's `order` keeps a float matrix [D, ...]; None is as it is."""
    if order == "panels" and math.prod(shape[1:]) <= BROAD:
        return Panels
    return Transposed if order in ("columns", "panels") else None


def is_matrix(name: str) -> bool:
    """Whether a parameter of this name is multiplied or gathered from, and nothing else."""
    return name in MATRICES or name == TABLE


def spec(weights: str, path: str, shape: tuple[int, ...]) -> Spec | None:
    """How int8 or int4 packs a parameter, None if it does not.

    Head and drafter are int8 either way: a head of four bits flips close decisions, and both
    are small beside the body.

    Args:
      path: with the role in front, as target/layers_0/mlp/down.
    """
    role, *_, name = path.split("/")
    if weights not in QUANTISED or name not in MATRICES:
        return None
    light = role == "drafter" or name == "head"
    kind = "int8" if light else QUANTISED[weights]
    kind = kind if fits(kind, shape[0]) else "int8"
    return 1, ((kind, shape[1]),)


def fits(kind: str, depth: int) -> bool:
    """Whether a weight contracted over `depth` numbers can be packed so."""
    return depth % KINDS[kind].unit == 0


def quantise(weight: np.ndarray, kind: str) -> Arrays:
    """Packs float weights [D, ...] as int8 or Q4_0, each to the nearest code.

    Of the 16 codes of Q4_0 the one without a counterpart, -8, goes to the largest weight of a
    group, whatever its sign, as ggml does.
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
    """A weight [D, ...] packed in one part."""
    (kind, _), *_ = how[1]
    columns = np.asarray(weight).reshape(len(weight), -1)
    return Packed(quantise(columns, kind), kind, weight.shape)


def pack_tree(params: Mapping[str, Any], specs: Mapping[str, Spec], at: str = "") -> dict[str, Any]:
    """A parameter tree with the specified leaves packed; paths begin with the role."""
    found: dict[str, Any] = {}
    for name, leaf in params.items():
        path = f"{at}{name}"
        if isinstance(leaf, Mapping):
            found[name] = pack_tree(leaf, specs, path + "/")
        elif path in specs:
            found[name] = pack(leaf, specs[path])
        else:
            found[name] = leaf
    return found


def dequantise(arrays: Mapping[str, np.ndarray], kind: str) -> np.ndarray:
    """The float32 weights [D, ...]: the oracle of every product with packed ones."""
    k, codes = KINDS[kind], arrays["codes"]
    if k.classes > 1:
        codes = split(codes, 2)
    if k.high:
        codes = codes | split(arrays["high"], 4) << 4
    w = codes.astype(np.float32) - np.float32(k.zero)
    scale = _spread(arrays["scale"].astype(np.float32), len(w))
    if k.sub:
        scale = scale * _spread(arrays["sub"].astype(np.float32), len(w))
    w *= scale
    if "low" in arrays:
        low = _spread(arrays["low"].astype(np.float32), len(w))
        w -= low * _spread(arrays["sub_low"].astype(np.float32), len(w))
    return w


def unpack_blocks(blocks: np.ndarray, kind: str) -> Arrays:
    """The arrays of rows of ggml blocks, uint8 [N, bytes of a row], as columns of [D, N]."""
    sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_K": 144, "Q6_K": 210}
    b = blocks.reshape(len(blocks), -1, sizes[kind])  # [N, blocks, bytes]

    def half(at: int) -> np.ndarray:
        return _columns(np.ascontiguousarray(b[..., at : at + 2]).view("<f2").astype(np.float16))

    if kind == "Q8_0":
        return {"codes": _columns(b[..., 2:].view(np.int8)), "scale": half(0)}
    if kind == "Q4_0":
        codes = np.concatenate([b[..., 2:] & 15, b[..., 2:] >> 4], axis=-1)
        return {"codes": join(_columns(codes), 2), "scale": half(0)}
    if kind == "Q4_K":
        sub, low = _six_bits(b[..., 4:16])
        # ggml pairs runs as we do: its bytes are ours
        codes = _columns(b[..., 16:])
        return {
            "codes": codes,
            "scale": half(0),
            "sub": _columns(sub),
            "low": half(2),
            "sub_low": _columns(low),
        }
    nibbles = b[..., :128].reshape(*b.shape[:2], 2, 2, RUN)  # [.., half, run of a pair, 32]
    # low nibbles are runs 0 and 1 of a half, high ones 2 and 3
    runs = np.stack([nibbles & 15, nibbles >> 4], axis=-3)  # [.., half, pair, run, 32]
    return {
        "codes": join(_columns(runs.reshape(*b.shape[:2], 256)), 2),
        "high": _columns(b[..., 128:192]),
        "scale": half(208),
        "sub": _columns(np.ascontiguousarray(b[..., 192:208]).view(np.int8)),
    }


def join(codes: np.ndarray, classes: int) -> np.ndarray:
    """Codes [D, ...] of 8 / classes bits into bytes [D / classes, ...]."""
    parts = codes.reshape(-1, classes, RUN, *codes.shape[1:])
    bits = 8 // classes
    joined = parts[:, 0].copy()
    for i in range(1, classes):
        joined |= parts[:, i] << np.uint8(bits * i)
    return joined.reshape(-1, *codes.shape[1:])


def split(packed: np.ndarray, classes: int) -> np.ndarray:
    """The codes of `join`."""
    parts = packed.reshape(-1, RUN, *packed.shape[1:])
    bits = 8 // classes
    mask = np.uint8((1 << bits) - 1)
    found = np.stack([parts >> np.uint8(bits * i) & mask for i in range(classes)], axis=1)
    return found.reshape(-1, *packed.shape[1:])


def packed_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a packed weight [D, ...]."""
    columns = math.prod(shape[1:])
    rows = KINDS[kind].arrays(shape[0]).values()
    return sum(count * columns * np.dtype(dtype).itemsize for count, dtype in rows)


def _spread(groups: np.ndarray, depth: int) -> np.ndarray:
    return np.repeat(groups, depth // len(groups), axis=0)


def _columns(parts: np.ndarray) -> np.ndarray:
    """[N, blocks, values] to [D, N], contiguous."""
    return np.ascontiguousarray(parts.reshape(len(parts), -1).T)


def _six_bits(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight lows of the 12 bytes of a Q4_K block."""
    first, second, third = b[..., :4], b[..., 4:8], b[..., 8:]
    scale = [first & 63, third & 15 | first >> 6 << 4]
    low = [second & 63, third >> 4 | second >> 6 << 4]
    return np.concatenate(scale, axis=-1), np.concatenate(low, axis=-1)
