"""Packed matrices: a file's own codes, rearranged, or floats that are quantised on reading."""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dflash_jax import families
from dflash_jax.config import AttentionConfig
from dflash_jax.converters.formats.canonical import Canonical, StoredRows
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.quants.stored import FORMATS, format_of, unpack_blocks
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.formats.slots import Keys, Slot, TensorPart
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.converters.hf_grouped import PackedSource
from dflash_jax.errors import CheckpointError
from dflash_jax.kernels.native.interleaved import (
    MOVED,
    empty,
    empty_stack,
    interleave,
    put_blocks,
    put_packed,
    quantise_int8,
)
from dflash_jax.quant.layouts import (
    FLOAT,
    KINDS,
    Arrays,
    Interleaved,
    Joined,
    Packed,
    Spec,
    pack,
)

PACKED_SOURCES = (GgufFile, PackedSource)  # sources with codes that products can use
UNQUANTISED = frozenset({"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"})
BETTER_NAMES = {"U8": "MXFP4"}  # types of safetensors that say nothing
CHUNK = 1 << 22  # weights that NumPy moves at a time
Fill = Callable[[Slot, Any], np.ndarray]  # reads a parameter in a dtype; None is the usual one


def stored_specs(
    tensors: Canonical, config: AttentionConfig, paths: Collection[str]
) -> dict[str, Spec]:
    """Return how the file packs parameters, by path, of those `paths` that can be used so."""
    if not isinstance(tensors.source, PACKED_SOURCES):
        return {}
    chosen = {}
    for slot in families.slots(config):
        if (path := "/".join(slot.path)) in paths:
            kinds = _kinds(tensors, slot)
            if any(kinds):
                chosen[path] = _spec(slot, kinds)
    return chosen


def unpacked_kinds(
    tensors: Canonical,
    config: AttentionConfig,
    paths: Collection[str],
    specs: Mapping[str, Spec],
) -> frozenset[str]:
    """Return the quantised types of those parameters at `paths` that are not kept packed.

    Args:
      specs: how parameters are packed, by path.
    """
    kinds = set()
    for slot in families.slots(config):
        if (path := "/".join(slot.path)) not in paths:
            continue
        spec = specs.get(path, (1, ((FLOAT, 0),)))
        packed = [kind for kind, _ in spec[1]]
        if len(packed) == 1:
            packed *= len(slot.parts)
        for part, kind in zip(slot.parts, packed, strict=True):
            origin = tensors.origins.get(part.name)
            if origin is not None and origin.names and not kind:
                kinds.add(tensors.kind(part.name))
    return frozenset(BETTER_NAMES.get(kind, kind) for kind in kinds - UNQUANTISED)


def read(
    tensors: Canonical,
    slots: list[Slot],
    specs: Mapping[str, Spec],
    fill: Fill,
    *,
    native: bool = False,
) -> dict[Keys, Packed | Interleaved | Joined]:
    """Return packed parameters by path.

    Args:
      fill: reads parameters that are quantised here or stay float.
      native: whether parameters are in strips, for the native kernels.
    """

    def one(slot: Slot) -> Packed | Interleaved | Joined:
        how = specs["/".join(slot.path)]
        kinds = [kind for kind, _ in how[1]]
        if slot.stack:
            return _stack(tensors, slot, kinds[0])
        if not _as_stored(tensors, slot, kinds):
            floats = fill(slot, np.float32)
            if native and kinds == ["int8"]:
                return quantise_int8(floats)
            made = pack(floats, how)
            return interleave(made) if native else made
        if len(kinds) == 1:
            return _uniform(tensors, slot, kinds[0], native)
        parts = tuple(
            _alone(tensors, slot, part, how[0], *kept, fill, native)
            for part, kept in zip(slot.parts, how[1], strict=True)
        )
        return Joined(parts, how[0], slot.shape)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return dict(zip((s.path for s in slots), pool.map(one, slots), strict=True))


def _kinds(tensors: Canonical, slot: Slot) -> list[str]:
    """Return the packed format of each part of a parameter, or the one of a stack, or FLOAT."""
    if not slot.stack:
        return [_kind(tensors, part) for part in slot.parts]
    kinds = set()
    for part in slot.parts:
        pieces = tensors.pieces(part.name)
        kinds |= {_kind_of_piece(tensors, piece, slot.shape[1]) for piece in pieces} or {FLOAT}
    return list(kinds) if len(kinds) == 1 else [FLOAT]


def _kind_of_piece(tensors: Canonical, piece: StoredRows, depth: int) -> str:
    if isinstance(tensors.source, PackedSource):
        return tensors.source.packed_kind(piece.name) if piece.rows is None else FLOAT
    return _format(tensors.source, piece.name, depth)


def _format(source: Any, name: str, depth: int) -> str:
    """Return the packed format that holds a tensor of a GGUF file exactly, or FLOAT."""
    return FLOAT if source.has_scale(name) else format_of(source.kind(name), depth)


def _kind(tensors: Canonical, part: TensorPart) -> str:
    """Return the packed format that holds a tensor exactly, or FLOAT."""
    if part.name not in tensors.origins:
        return FLOAT
    origin = tensors.origins[part.name]
    if not origin.as_stored:
        return FLOAT
    if isinstance(tensors.source, PackedSource):
        return tensors.source.packed_kind(origin.name) if origin.whole else FLOAT
    kind = tensors.kind(part.name)
    columns = origin.columns
    if columns is not None and kind in FORMATS and _moved(columns, kind) is None:
        return FLOAT
    return _format(tensors.source, origin.name, part.shape[-1])


def _moved(columns: np.ndarray, kind: str) -> np.ndarray | None:
    """Return an order of columns as an order of blocks; None if it would split blocks."""
    size = BY_NAME[kind].block_size
    first = columns[::size]
    whole = (first[:, None] + np.arange(size)).reshape(-1)
    return first // size if np.array_equal(whole, columns) and not (first % size).any() else None


def _as_stored(tensors: Canonical, slot: Slot, kinds: list[str]) -> bool:
    """Return whether the file's codes are used, instead of quantising floats."""
    stored = isinstance(tensors.source, PACKED_SOURCES)
    return stored and {_kind(tensors, p) for p in slot.parts} == {*kinds}


def _spec(slot: Slot, kinds: list[str]) -> Spec:
    if len({*kinds}) == 1:
        return 1, ((kinds[0], slot.shape[1]),)
    axes, widths = zip(*(_place(slot, part) for part in slot.parts), strict=True)
    assert len({*axes}) == 1, slot
    return axes[0], tuple(zip(kinds, widths, strict=True))


def _place(slot: Slot, part: TensorPart) -> tuple[int, int]:
    """Return the axis that divides a parameter into its parts, and the width of a part."""
    for axis, chosen in zip(part.axes, part.select, strict=False):
        if isinstance(chosen, int):
            return axis, 1
        if chosen != slice(None):
            return axis, len(range(*chosen.indices(slot.shape[axis])))
    raise CheckpointError(f"{part.name} fills all of {'/'.join(slot.path)}")


def _uniform(tensors: Canonical, slot: Slot, kind: str, native: bool) -> Packed | Interleaved:
    """Return all parts as one weight, in the order of the parameter's columns."""
    columns = slot.shape[1:]
    if native and isinstance(tensors.source, GgufFile):
        return _interleaved(tensors, slot, kind)
    arrays = {
        name: np.empty((rows, *columns), dtype)
        for name, (rows, dtype) in KINDS[kind].arrays(slot.shape[0]).items()
    }
    for part in slot.parts:
        for name, values in _stored_arrays(tensors, part, kind).items():
            view = part.view(arrays[name])
            view[...] = values.T.reshape(view.shape)
    flat = {name: a.reshape(len(a), -1) for name, a in arrays.items()}
    made = Packed(flat, kind, slot.shape)
    return interleave(made) if native else made


def _interleaved(tensors: Canonical, slot: Slot, kind: str) -> Interleaved:
    """Return all parts as one weight in strips, moved there from the file."""
    numbers = np.arange(math.prod(slot.shape[1:])).reshape(1, *slot.shape[1:])
    made = empty(kind, slot.shape)
    for part in slot.parts:
        _move(made, _blocks(tensors, part), part.view(numbers).reshape(-1), tensors.kind(part.name))
    _check_finite(made.arrays, "/".join(slot.path))
    return made


def _move(made: Interleaved, blocks: np.ndarray, columns: np.ndarray, type_: str) -> None:
    """Put rows of blocks [n, bytes] in place as columns of a weight in strips."""
    if type_ in MOVED:
        put_blocks(made, blocks, columns, type_, lambda: trim_mapped_memory(blocks))
        return
    step = max(CHUNK // made.shape[0], 1)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        arrays = unpack_blocks(part, type_, made.kind)
        some = columns[start : start + step]
        put_packed(made, Packed(arrays, made.kind, (made.shape[0], len(some))), some)
        trim_mapped_memory(part)


def _stack(tensors: Canonical, slot: Slot, kind: str) -> Interleaved:
    """Return a stack of experts in strips, moved there from the file."""
    made = empty_stack(kind, slot.shape)
    experts, _, *columns = slot.shape
    numbers = np.arange(experts * math.prod(columns)).reshape(experts, 1, *columns)
    for part in slot.parts:
        places = part.view(numbers).reshape(-1)
        for piece in tensors.pieces(part.name):
            of, own = np.divmod(places[piece.outputs], math.prod(columns))
            _move_experts(tensors, piece, made, of, own)
    _check_finite(made.arrays, "/".join(slot.path))
    return made


def _move_experts(
    tensors: Canonical,
    piece: StoredRows,
    made: Interleaved,
    experts: np.ndarray,
    columns: np.ndarray,
) -> None:
    """Put rows of a stored tensor in place.

    Args:
      experts, columns: the expert and the column of each row; experts ascend.
    """
    source = tensors.source
    chosen, starts = np.unique(experts, return_index=True)
    for expert, start, stop in zip(chosen, starts, [*starts[1:], len(experts)], strict=True):
        one = made.expert(expert)
        rows = slice(start, stop)
        own = columns[start:stop]
        if isinstance(source, GgufFile):
            blocks = _chosen(source.raw(piece.name), piece.rows)[rows]
            _move(one, blocks, own, source.kind(piece.name))
        else:
            assert isinstance(source, PackedSource)
            arrays = {name: a[:, rows] for name, a in source.packed(piece.name).items()}
            put_packed(one, Packed(arrays, made.kind, (one.shape[0], len(own))), own)


def _chosen(raw: np.ndarray, rows: np.ndarray | range | None) -> np.ndarray:
    """Return rows of an origin; a range as a view."""
    if rows is None:
        return raw
    return raw[slice(rows.start, rows.stop) if isinstance(rows, range) else rows]


def _alone(
    tensors: Canonical,
    slot: Slot,
    part: TensorPart,
    axis: int,
    kind: str,
    width: int,
    fill: Fill,
    native: bool,
) -> Any:
    """Return one part of a parameter as a separate weight."""
    shape = (*slot.shape[:axis], width, *slot.shape[axis + 1 :])
    select = tuple(0 if isinstance(s, int) else slice(None) for s in part.select)
    own = Slot(slot.path, shape, (dataclasses.replace(part, select=select),))
    return _uniform(tensors, own, kind, native) if kind else fill(own, None)


def _stored_arrays(tensors: Canonical, part: TensorPart, kind: str) -> Arrays:
    """Return the packed arrays of a tensor, [rows along D, outputs].

    Raises:
      CheckpointError: a scale is not finite.
    """
    origin = tensors.origins[part.name]
    source = tensors.source
    if isinstance(source, PackedSource):
        arrays = source.packed(origin.name)
    else:
        arrays = unpack_blocks(_blocks(tensors, part), tensors.kind(part.name), kind)
    _check_finite(arrays, part.name)
    return arrays


def _check_finite(arrays: Arrays, name: str) -> None:
    for scale in ("scale", "low"):
        if scale in arrays and not np.isfinite(arrays[scale]).all():
            raise CheckpointError(
                f"{name} holds scales that are NaN or infinite; fetch the file again"
            )


def _blocks(tensors: Canonical, part: TensorPart) -> np.ndarray:
    """Return a tensor's rows of blocks, [N, bytes]."""
    origin = tensors.origins[part.name]
    source = tensors.source
    assert isinstance(source, GgufFile)
    raw = _chosen(source.raw(origin.name), origin.rows)
    if origin.columns is not None:
        type_ = BY_NAME[tensors.kind(part.name)]
        raw = raw.reshape(len(raw), -1, type_.block_bytes)[:, _moved(origin.columns, type_.name)]
    return raw.reshape(len(raw), -1)
