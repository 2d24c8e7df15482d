"""Writes GGUF version 3: used to export drafters. Plain types only; no quantisation."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from converters.gguf.header import ARRAY, STRING, round_up
from converters.quants.types import BY_NAME
from dflash_jax.errors import CheckpointError

ALIGNMENT = 32
U32, I32, F32, BOOL = 4, 5, 6, 7
_FORMS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type; lists become arrays of that type."""

    kind: int
    value: Any


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, Typed],
    tensors: Iterable[tuple[str, str, np.ndarray]],
) -> None:
    """Writes metadata and (name, type, array) tensors, in the order given."""
    listed = list(tensors)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(listed), len(metadata))]
    head += [_text(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for name, kind, array in listed:
        if BY_NAME[kind].dtype != array.dtype:
            raise CheckpointError(
                f"{name}: {array.dtype} cannot be written as {kind}; cast it first"
            )
        dims = array.shape[::-1]
        head.append(_text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        head.append(struct.pack("<IQ", BY_NAME[kind].number, offset))
        offset = round_up(offset + array.nbytes, ALIGNMENT)
    _padded(file, b"".join(head))
    for _, _, array in listed:
        _padded(file, np.ascontiguousarray(array).data)


def _padded(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if memoryview(data).ndim else memoryview(data)
    file.write(view)
    file.write(b"\0" * (round_up(len(view), ALIGNMENT) - len(view)))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(item: Typed) -> bytes:
    if isinstance(item.value, list):
        body = b"".join(_scalar(item.kind, v) for v in item.value)
        return struct.pack("<IIQ", ARRAY, item.kind, len(item.value)) + body
    return struct.pack("<I", item.kind) + _scalar(item.kind, item.value)


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == STRING else struct.pack(_FORMS[kind], value)
