"""Write GGUF version 3, tensor by tensor."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from dflash_jax.converters.formats.gguf.file import (
    ARRAY,
    SCALARS,
    STRING,
    GgufArray,
    GgufHeader,
    round_up,
)
from dflash_jax.converters.formats.quants.types import GgmlType
from dflash_jax.converters.formats.safetensors import flat_bytes

ALIGNMENT = 32
VERSION = 3
U16 = 2
U32 = 4
I32 = 5
F32 = 6
BOOL = 7
U64 = 10
I64 = 11
# Names of the types of values.
KINDS = {
    "str": STRING,
    "bool": BOOL,
    "u8": 0,
    "i8": 1,
    "u16": U16,
    "i16": 3,
    "u32": U32,
    "i32": I32,
    "f32": F32,
    "u64": U64,
    "i64": I64,
    "f64": 12,
}
KIND_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type; lists and arrays of files become arrays of that type."""

    kind: int
    value: Any


@dataclass(frozen=True)
class PlannedBlocks:
    """A tensor to be written, with its stored type."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) // self.kind.block_size * self.kind.block_bytes


def typed(value: Any) -> Typed:
    """Return a value read from a file in the form that `write_gguf` takes."""
    if isinstance(value, Typed):
        return typed(value.value) if isinstance(value.value, GgufArray) else value
    if isinstance(value, GgufArray):
        return Typed(value.kind, value.tolist())
    small = type(value) is int and 0 <= value < 1 << 32
    kinds = {bool: BOOL, int: U32 if small else I64, float: F32, str: STRING}
    return Typed(kinds[type(value)], value)


def stored_keys(header: GgufHeader) -> dict[str, Typed]:
    """Return the metadata of a file with the types that it has there."""
    return {
        key: Typed(value.kind if isinstance(value, GgufArray) else header.places[key].kind, value)
        for key, value in header.metadata.items()
    }


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, Typed],
    tensors: Sequence[PlannedBlocks],
    read: Callable[[PlannedBlocks], np.ndarray],
    *,
    alignment: int = ALIGNMENT,
) -> None:
    """Write metadata, then the tensors in order.

    Args:
      read: returns the values or blocks of a tensor; called for each in turn, so that one is in
        memory.
    """
    head = head_bytes(metadata, tensors, alignment)
    _padded(file, np.frombuffer(head, np.uint8), alignment)
    for tensor in tensors:
        _padded(file, flat_bytes(read(tensor)), alignment)


def head_bytes(
    metadata: Mapping[str, Typed],
    tensors: Sequence[PlannedBlocks],
    alignment: int = ALIGNMENT,
    version: int = VERSION,
) -> bytes:
    """Return all that comes before the tensors, without the padding at its end."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [_text(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        head.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        head.append(struct.pack("<IQ", tensor.kind.number, offset))
        offset = round_up(offset + tensor.nbytes, alignment)
    return b"".join(head)


def _padded(file: BinaryIO, data: np.ndarray, alignment: int) -> None:
    file.write(data.data)
    file.write(b"\0" * (round_up(data.nbytes, alignment) - data.nbytes))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(item: Typed) -> bytes:
    if isinstance(item.value, GgufArray):
        return struct.pack("<IIQ", ARRAY, item.kind, len(item.value)) + item.value.raw
    if isinstance(item.value, list):
        body = b"".join(_scalar(item.kind, v) for v in item.value)
        return struct.pack("<IIQ", ARRAY, item.kind, len(item.value)) + body
    return struct.pack("<I", item.kind) + _scalar(item.kind, item.value)


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == STRING else struct.pack(SCALARS[kind], value)
