"""Hugging Face weights packed by AWQ, GPTQ and compressed-tensors, decoded or rearranged."""

import abc
import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np

from dflash_jax.converters.formats.source import DecodedSource, Rows, TensorSource
from dflash_jax.errors import CheckpointError
from dflash_jax.quant.layouts import RUN, Arrays, fits, join

# How AWQ, GPTQ and compressed-tensors store matrices of integers in 32-bit words.
#
# A weight [out, in] is (code - zero point) * scale, with a zero point and a scale for each output
# and group of inputs. The formats differ in their tensors, and in the axis along which words are
# packed:
#
# | layout | codes | scales | zero points |
# | --- | --- | --- | --- |
# | AWQ gemm | [in, out words] | [groups, out] | [groups, out words] |
# | AWQ gemv | [out, in words] | [out, groups] | [out, group words] |
# | GPTQ | [in words, out] | [groups, out] | [groups, out words] |
# | compressed-tensors | [out, in words] | [out, groups] | [out words, groups] |
#
# Values are packed from the lowest bit on, without gaps. Facts: the packing code of autoawq 0.2.9,
# auto-gptq 0.7.1, gptqmodel 7.7.0 and compressed-tensors 0.20.0.


WIDTHS = (2, 3, 4, 8)  # bits of a code
WORD = 32
WEIGHT_SHAPE = "weight_shape"  # outputs and inputs, in compressed-tensors
Shapes = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class WordLayout:
    """How a format stores a matrix.

    Attributes:
      tensors: names of codes, scales, zero points and group numbers, after the module's name.
      outputs_last: whether the tensors' last axis is that of the outputs.
      codes_by_output, zeros_by_output: whether a word holds neighbouring outputs.
      interleaved: whether words that hold outputs have them in the order `INTERLEAVED`.
      zero_offset: number added to stored zero points.
    """

    tensors: tuple[str, str, str, str]
    outputs_last: bool = False
    codes_by_output: bool = False
    zeros_by_output: bool = True
    interleaved: bool = False
    zero_offset: int = 0


_AUTO = ("qweight", "scales", "qzeros", "g_idx")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
AWQ_GEMM = WordLayout(_AUTO, outputs_last=True, codes_by_output=True, interleaved=True)
AWQ_GEMV = WordLayout(_AUTO, zeros_by_output=False)
GPTQ = WordLayout(_AUTO, outputs_last=True, zero_offset=1)
GPTQ_V2 = dataclasses.replace(GPTQ, zero_offset=0)
COMPRESSED = WordLayout(_COMPRESSED)


@dataclasses.dataclass(frozen=True)
class PackedLinear:
    """One stored matrix.

    Attributes:
      order: the group of each input; None if groups are runs of `group` inputs.
    """

    stem: str  # the module's name and a dot
    shape: tuple[int, int]
    bits: int
    group: int
    groups: int
    zeros: bool  # whether zero points are stored; without, they are in the middle of the codes
    order: np.ndarray | None = None


def described(
    source: TensorSource,
    layout: WordLayout,
    stem: str,
    names: Collection[str],
    *,
    bits: int | None,
    group: int | None,
) -> PackedLinear:
    """Return a matrix, after a check that its tensors fit one another.

    Args:
      stem: the name of its module and a dot.
      names: all tensors of the source.
      bits: bits of a code; None to find them by the shapes.
      group: inputs of a group; -1 for all of them, None to find them by the shapes.

    Raises:
      CheckpointError: a tensor is missing, or they do not fit.
    """
    own = [f"{stem}{tensor}" for tensor in (*layout.tensors, WEIGHT_SHAPE)]
    codes, scales, zeros, order, _ = own
    shapes = {name: source.shape(name) for name in own if name in names}
    for name in (scales, *([] if layout is COMPRESSED else [zeros])):
        if name not in shapes:
            raise CheckpointError(f"{codes} lacks {name}; the weights are incomplete")
    for name in (codes, zeros):
        unpacked = ("I8",) if name == zeros and layout is COMPRESSED else ()
        kinds = ("I32", "U32", *unpacked)
        if name in shapes and (len(shapes[name]) != 2 or source.kind(name) not in kinds):
            raise CheckpointError(
                f"{name} is {source.kind(name)} {list(shapes[name])}; expected a matrix of 32-bit"
                " words"
            )
    bits, out, into = _sizes(source, layout, stem, shapes, bits)
    if not out or not into:
        raise CheckpointError(f"{codes} {list(shapes[codes])} is empty; fetch the weights again")
    if group is None:
        groups = math.prod(shapes[scales][1:])
        if not groups or into % groups:
            raise CheckpointError(
                f"{scales} has the shape {list(shapes[scales])}, whose {groups} groups do not"
                f" divide the {into} inputs of {codes}; fetch the weights again"
            )
        group = into // groups
    else:
        group = into if group == -1 else group
        groups = -(-into // group)
    wanted = _shapes(layout, (out, into), bits, (groups, group))
    if zeros in shapes and source.kind(zeros) == "I8":
        wanted["zeros"] = wanted["scales"]
    for name, allowed in zip((codes, scales, zeros), wanted.values(), strict=True):
        if name in shapes and shapes[name] not in allowed:
            raise CheckpointError(
                f"{name} has the shape {list(shapes[name])}, expected {list(allowed[0])} for {out}"
                f" outputs, {into} inputs, {bits} bits and groups of {group}; give the"
                " quantization_config that belongs to the weights"
            )
    linear = PackedLinear(stem, (out, into), bits, group, groups, zeros in shapes)
    if order not in shapes:
        return dataclasses.replace(linear, order=_runs(linear))
    return dataclasses.replace(linear, order=_order(source, order, linear))


def _sizes(
    source: TensorSource,
    layout: WordLayout,
    stem: str,
    shapes: Mapping[str, tuple[int, ...]],
    bits: int | None,
) -> tuple[int, int, int]:
    """Return the bits of a code, the outputs and the inputs of a matrix."""
    codes = f"{stem}{layout.tensors[0]}"
    order = f"{stem}{layout.tensors[3]}"
    out, words = reversed(shapes[codes]) if layout.outputs_last else shapes[codes]
    if bits and layout.codes_by_output:
        return bits, out * WORD // bits, words
    into = shapes.get(order, (0,))[0]
    if layout is COMPRESSED:
        name = f"{stem}{WEIGHT_SHAPE}"
        stored = source.read(name).reshape(-1).tolist() if name in shapes else []
        if len(stored) != 2 or not all(type(n) is int and n > 0 for n in stored):
            raise CheckpointError(
                f"{name} is {stored or 'missing'}; expected the outputs and inputs of {codes}"
            )
        out, into = stored
    if bits is None:
        bits = next((b for b in WIDTHS if into and -(-into * b // WORD) == words), None)
    if bits is None:
        raise CheckpointError(
            f"{codes} has {words} words for {into} inputs, which is none of"
            f" {', '.join(map(str, WIDTHS))} bits without gaps between codes; quantise the model"
            " again, with a recent version of its library"
        )
    return bits, out, into or words * WORD // bits


def _shapes(
    layout: WordLayout, shape: tuple[int, int], bits: int, group: tuple[int, int]
) -> dict[str, Shapes]:
    """Return the allowed shapes of codes, scales and zero points, the usual one first."""
    out, into = shape
    groups, size = group

    def words(count: int) -> int:
        return -(-count * bits // WORD)

    codes = (words(out), into) if layout.codes_by_output else (out, words(into))
    zeros = (words(out), groups) if layout.zeros_by_output else (out, words(groups))
    scales = (out, groups)
    if layout is AWQ_GEMV:  # its kernel reads 128 inputs at a time
        multiple = {32: 4, 64: 2}.get(size, 1)
        width = -(-words(groups) // multiple) * multiple
        zeros = (out, width)
        scales = (out, width * WORD // bits)
    if layout.outputs_last:
        return {"codes": [codes[::-1]], "scales": [scales[::-1]], "zeros": [zeros[::-1]]}
    allowed: dict[str, Shapes] = {"codes": [codes], "scales": [scales], "zeros": [zeros]}
    if layout is COMPRESSED and groups == 1:
        allowed["scales"] += [(1,), (1, 1), (out,)]
    return allowed


def _order(source: TensorSource, name: str, linear: PackedLinear) -> np.ndarray | None:
    """Return the group of each input as the file names it, or None if groups are runs."""
    into = linear.shape[1]
    group = linear.group
    order = source.read(name)
    if not order.size or (order == -1).all():  # never filled
        return _runs(linear)
    if order.shape != (into,) or order.dtype.kind not in "iu":
        raise CheckpointError(
            f"{name} is {source.kind(name)} {list(order.shape)}; expected {into} integers, the"
            " group of each input"
        )
    if order.min() < 0 or order.max() >= linear.groups:
        wrong = int(order[(order < 0) | (order >= linear.groups)][0])
        raise CheckpointError(
            f"{name} names group {wrong}, but there are scales for {linear.groups} groups; fetch"
            " the weights again, or give the quantization_config that belongs to them"
        )
    as_runs = np.array_equal(order, np.arange(into) // group)
    return _runs(linear) if as_runs else order.astype(np.intp)


def _runs(linear: PackedLinear) -> np.ndarray | None:
    """Return the group of each input if the last group is shorter than the others, or None."""
    into = linear.shape[1]
    group = linear.group
    return np.arange(into) // group if into % group else None


# Place of each of eight outputs in a word of AWQ's gemm layout.
INTERLEAVED = np.array([0, 4, 1, 5, 2, 6, 3, 7])
SYMMETRIC = {4: "Q4_0", 8: "Q8_0"}  # packed formats by bits
WITH_ZEROS = {4: "int4z"}


class PackedSource(DecodedSource):
    """A source with codes that products can use as they are, rearranged."""

    @abc.abstractmethod
    def packed_kind(self, name: str) -> str:
        """Return the packed format that holds exactly a matrix, or ""."""

    @abc.abstractmethod
    def packed(self, name: str) -> Arrays:
        """Return the packed arrays [rows along in, out] of a matrix that has a packed kind."""


class GroupedSource(PackedSource):
    """Integers with a scale for each group of inputs, decoded to `.weight`.

    Args:
      bits: bits of a code; None to find them by the shapes.
      group: inputs of a group; -1 for all of them, None to find them by the shapes.

    Raises:
      CheckpointError: tensors of a matrix are missing or do not fit one another.
    """

    def __init__(
        self, source: TensorSource, layout: WordLayout, *, bits: int | None, group: int | None
    ):
        self._layout = layout
        self._linears: dict[str, PackedLinear] = {}
        names = set(source.names())
        hidden = set()
        decoded = {}
        codes = layout.tensors[0]
        for name in source.names():
            stem = name.removesuffix(codes)
            if stem == name or not stem.endswith("."):
                continue
            weight = f"{stem}weight"
            if weight in names:
                raise CheckpointError(f"{name} and {weight} are the same matrix; keep one of them")
            self._linears[weight] = described(source, layout, stem, names, bits=bits, group=group)
            decoded[weight] = name
            hidden |= {f"{stem}{tensor}" for tensor in (*layout.tensors, WEIGHT_SHAPE)}
        super().__init__(source, decoded, hidden)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        linear = self._linears.get(name)
        return self._source.shape(name) if linear is None else linear.shape

    def kind(self, name: str) -> str:
        """Return the stored type; INT4 and the like for decoded matrices."""
        linear = self._linears.get(name)
        return self._source.kind(name) if linear is None else f"INT{linear.bits}"

    def packed_kind(self, name: str) -> str:
        """Return the packed format that holds exactly a matrix, or "".

        Its groups must be neighbouring inputs, and float16 must hold its scales.
        """
        linear = self._linears.get(name)
        if linear is None or linear.order is not None or linear.group % RUN:
            return ""
        everything = slice(0, linear.shape[0])
        middle = (self._zeros(linear, everything) == 1 << linear.bits - 1).all()
        kind = (SYMMETRIC if middle else WITH_ZEROS).get(linear.bits, "")
        if not kind or not fits(kind, linear.shape[1]):
            return ""
        scales = self._scales(linear, everything)
        with np.errstate(over="ignore"):
            return kind if np.array_equal(scales, scales.astype(np.float16)) else ""

    def packed(self, name: str) -> Arrays:
        """Return the packed arrays [rows along in, out] of a matrix that has a packed kind."""
        linear = self._linears[name]
        everything = slice(0, linear.shape[0])
        codes = np.ascontiguousarray(self._codes(linear, everything).T)
        joined = join(codes, 2) if linear.bits == 4 else (codes ^ np.uint8(128)).view(np.int8)
        groups: Arrays = {"scale": self._scales(linear, everything).astype(np.float16)}
        if self.packed_kind(name) in WITH_ZEROS.values():
            groups["zero"] = self._zeros(linear, everything).astype(np.uint8)
        spread = {key: np.repeat(a.T, linear.group // RUN, axis=0) for key, a in groups.items()}
        return {"codes": joined, **spread}

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        linear = self._linears[name]
        values = self._codes(linear, rows).astype(np.float32)
        scales = self._scales(linear, rows)
        zeros = self._zeros(linear, rows).astype(np.float32)
        if linear.order is not None:
            values -= zeros[:, linear.order]
            values *= scales[:, linear.order]
            return values
        groups = values.reshape(len(values), linear.groups, linear.group)
        groups -= zeros[..., None]
        groups *= scales[..., None]
        return values

    def _codes(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        words = self._words(linear, self._layout.tensors[0])
        return self._unpacked(words, linear, rows, linear.shape[1], self._layout.codes_by_output)

    def _zeros(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        """Return zero points, integers [rows, groups]."""
        bits = linear.bits
        name = f"{linear.stem}{self._layout.tensors[2]}"
        middle = 1 << bits - 1
        if not linear.zeros:
            count = len(range(linear.shape[0])[rows] if isinstance(rows, slice) else rows)
            return np.full((count, linear.groups), middle)
        if self._source.kind(name) == "I8":  # early compressed-tensors did not pack them
            return self._source.read(name).reshape(-1, linear.groups)[rows].astype(int) + middle
        words = self._words(linear, self._layout.tensors[2])
        offset = self._layout.zero_offset
        if offset and WORD % bits == 0:
            # Writers subtract from whole words, so that a field of 0 borrows from the next one.
            words = words + np.uint32(sum(offset << i for i in range(0, WORD, bits)))
            offset = 0
        zeros = self._unpacked(words, linear, rows, linear.groups, self._layout.zeros_by_output)
        return zeros + np.uint8(offset) & np.uint8((1 << bits) - 1)

    def _scales(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        """Return scales, float32 [rows, groups]."""
        scales = self._source.read(f"{linear.stem}{self._layout.tensors[1]}")
        scales = scales.T if self._layout.outputs_last else scales
        if scales.size == 1:
            scales = np.broadcast_to(scales.reshape(1, 1), (linear.shape[0], 1))
        return scales.reshape(linear.shape[0], -1)[rows, : linear.groups].astype(np.float32)

    def _words(self, linear: PackedLinear, tensor: str) -> np.ndarray:
        """Return the words of a tensor, with the axis of the outputs first."""
        words = self._source.read(f"{linear.stem}{tensor}").view(np.uint32)
        return words.T if self._layout.outputs_last else words

    def _unpacked(
        self, words: np.ndarray, linear: PackedLinear, rows: Rows, count: int, by_output: bool
    ) -> np.ndarray:
        """Return chosen rows of packed values as bytes [rows, count]."""
        if not by_output:
            return unpacked(words[rows], linear.bits)[:, :count]
        chosen = np.arange(linear.shape[0])[rows]
        if not len(chosen):
            return np.empty((0, count), np.uint8)
        # 32 values fill whole words, whatever their width.
        first = int(chosen.min()) // WORD
        words = words[first * linear.bits : (int(chosen.max()) // WORD + 1) * linear.bits]
        columns = chosen - first * WORD
        if self._layout.interleaved:
            columns = columns // 8 * 8 + INTERLEAVED[columns % 8]
        return unpacked(words.T, linear.bits).T[columns, :count]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the values in rows of 32-bit words, as bytes; from the lowest bit on."""
    parts = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return parts
    if bits in (5, 6):  # eight values in as many bytes
        eights = np.zeros((len(parts), parts.shape[1] // bits, 8), np.uint8)
        eights[:, :, :bits] = parts.reshape(len(parts), -1, bits)
        values = eights.view("<u8") >> np.arange(0, 8 * bits, bits).astype(np.uint64)
        return (values & np.uint64((1 << bits) - 1)).astype(np.uint8).reshape(len(parts), -1)
    if bits == 3:  # eight values in three bytes, looked up by half of their bits
        parts = np.pad(parts, ((0, 0), (0, -parts.shape[1] % 3))).astype(np.uint16)
        first = parts[:, ::3]
        second = parts[:, 1::3]
        third = parts[:, 2::3]
        halves = first | (second & 15) << 8, second >> 4 | third << 4
        parts = np.stack(halves, axis=-1).reshape(len(parts), 2 * first.shape[1])
    return TABLES[bits][parts].view(np.uint8)


def _table(bits: int, width: int) -> np.ndarray:
    """Return the values in each number of `width` bits, as the bytes of one integer."""
    numbers = np.arange(1 << width)[:, None]
    starts = np.arange(0, width, bits)
    values = (numbers >> starts & (1 << bits) - 1).astype(np.uint8)
    return values.view(f"u{len(starts)}")[:, 0]


TABLES = {2: _table(2, 8), 3: _table(3, 12), 4: _table(4, 8)}
