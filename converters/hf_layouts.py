"""How AWQ, GPTQ and compressed-tensors store matrices of integers in 32-bit words.

A weight [out, in] is (code - zero point) * scale, with a zero point and a scale for each output and
group of inputs. The formats differ in their tensors, and in the axis along which words are packed:

| layout | codes | scales | zero points |
| --- | --- | --- | --- |
| AWQ gemm | [in, out words] | [groups, out] | [groups, out words] |
| AWQ gemv | [out, in words] | [out, groups] | [out, group words] |
| GPTQ | [in words, out] | [groups, out] | [groups, out words] |
| compressed-tensors | [out, in words] | [out, groups] | [out words, groups] |

Values are packed from the lowest bit on, without gaps. Facts: the packing code of autoawq 0.2.9,
auto-gptq 0.7.1, gptqmodel 7.7.0 and compressed-tensors 0.20.0.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np

from dflash_jax.converters.source import TensorSource
from dflash_jax.errors import CheckpointError

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
    found = PackedLinear(stem, (out, into), bits, group, groups, zeros in shapes)
    if order not in shapes:
        return dataclasses.replace(found, order=_runs(found))
    return dataclasses.replace(found, order=_order(source, order, found))


def _sizes(
    source: TensorSource,
    layout: WordLayout,
    stem: str,
    shapes: Mapping[str, tuple[int, ...]],
    bits: int | None,
) -> tuple[int, int, int]:
    """Return the bits of a code, the outputs and the inputs of a matrix."""
    codes, order = f"{stem}{layout.tensors[0]}", f"{stem}{layout.tensors[3]}"
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
    (out, into), (groups, size) = shape, group

    def words(count: int) -> int:
        return -(-count * bits // WORD)

    codes = (words(out), into) if layout.codes_by_output else (out, words(into))
    zeros = (words(out), groups) if layout.zeros_by_output else (out, words(groups))
    scales = (out, groups)
    if layout is AWQ_GEMV:  # its kernel reads 128 inputs at a time
        multiple = {32: 4, 64: 2}.get(size, 1)
        width = -(-words(groups) // multiple) * multiple
        zeros, scales = (out, width), (out, width * WORD // bits)
    found: dict[str, Shapes] = {"codes": [codes], "scales": [scales], "zeros": [zeros]}
    if layout.outputs_last:
        return {name: [shapes[0][::-1]] for name, shapes in found.items()}
    if layout is COMPRESSED and groups == 1:
        found["scales"] += [(1,), (1, 1), (out,)]
    return found


def _order(source: TensorSource, name: str, linear: PackedLinear) -> np.ndarray | None:
    """Return the group of each input as the file names it, or None if groups are runs."""
    into, group, order = linear.shape[1], linear.group, source.read(name)
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
    into, group = linear.shape[1], linear.group
    return np.arange(into) // group if into % group else None
