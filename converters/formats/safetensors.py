"""safetensors files: headers are checked entry by entry, tensors read lazily; and a writer."""

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.converters.formats.source import Rows, as_rows, map_file
from dflash_jax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
MAX_DIMS = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a header; `begin` and `end` count bytes from the start of the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped .safetensors file, as a `TensorSource`."""

    def __init__(self, path: Path, buffer: mmap.mmap, data_start: int, header: "SafetensorsHeader"):
        self.path = path
        self.metadata = header.metadata
        self._buffer = buffer
        self._data_start = data_start
        self._entries = {entry.name: entry for entry in header.entries}

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return DTYPES[self._entry(name).kind]

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self._entry(name).kind

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        entry = self._entry(name)
        return entry.end - entry.begin

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """Return the mapped file."""
        return (self._buffer,)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        entry = self._entry(name)
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, DTYPES[entry.kind])
        start = self._data_start + entry.begin
        flat = np.frombuffer(self._buffer, DTYPES[entry.kind], count, start)
        return flat.reshape(entry.shape)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return as_rows(self.read(name))[rows]

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}; it holds {len(self._entries)} others"
            ) from None


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header: tensors ordered by offset, and the free-text metadata."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Map a file and check its header.

    Raises:
      CheckpointError: the file is missing, truncated or malformed.
    """
    path = Path(path)
    buffer = map_file(path)
    if len(buffer) < 8:
        raise CheckpointError(
            f"{path} has {len(buffer)} bytes; a safetensors file starts with 8 bytes of header"
            " length, so it is truncated: fetch it again"
        )
    length = int.from_bytes(buffer[:8], "little")
    if not 0 < length <= MAX_HEADER or 8 + length > len(buffer):
        raise CheckpointError(
            f"{path} claims a header of {length} bytes in a file of {len(buffer)};"
            " it is truncated or not safetensors: fetch it again"
        )
    header = parse_header(buffer[8 : 8 + length], where=str(path))
    _check_tiling(header.entries, len(buffer) - 8 - length, where=str(path))
    return SafetensorsFile(path, buffer, 8 + length, header)


def parse_header(raw: bytes, *, where: str) -> SafetensorsHeader:
    """Return the entries of a JSON header.

    Raises:
      CheckpointError: the header is malformed; the message names the place.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{where}: the header does not start with '{{'; not safetensors")
    try:
        fields = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: the header is not valid JSON ({error}); fetch the file again"
        ) from None
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        key.isprintable() and type(value) is str for key, value in metadata.items()
    ):
        raise CheckpointError(
            f"{where}: __metadata__ must map printable strings to strings; rewrite the file"
        )
    entries = [_entry(name, fields[name], where) for name in fields]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    return SafetensorsHeader(tuple(entries), metadata)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice!r} appears twice")
    return fields


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _entry(name: str, fields: Any, where: str) -> Entry:
    if not name.isprintable():
        raise CheckpointError(f"{where}: the tensor name {name!r} is unprintable; rewrite the file")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: tensor {name!r} must have exactly dtype, shape and data_offsets"
        )
    kind = fields["dtype"]
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"{where}: tensor {name!r} has the dtype {kind!r}; supported are {', '.join(DTYPES)}"
        )
    if not _is_counts(shape) or len(shape) > MAX_DIMS or math.prod(filter(None, shape)) >= 2**60:
        raise CheckpointError(
            f"{where}: tensor {name!r} has the shape {shape!r}; expected up to {MAX_DIMS}"
            " non-negative integers"
        )
    if not _is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: tensor {name!r} has data_offsets {offsets!r}; expected [begin, end]"
        )
    size = math.prod(shape) * DTYPES[kind].itemsize
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(
            f"{where}: tensor {name!r} ({kind} {shape}) needs {size} bytes but data_offsets"
            f" {offsets} span {offsets[1] - offsets[0]}"
        )
    return Entry(name, kind, tuple(shape), offsets[0], offsets[1])


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_tiling(entries: tuple[Entry, ...], size: int, *, where: str) -> None:
    """Check that tensors cover the data exactly: no overlap, no gap, nothing past the end."""
    last = max((entry.end for entry in entries), default=0)
    if last > size:
        first = next(entry.name for entry in entries if entry.end > size)
        raise CheckpointError(
            f"{where} is truncated: the header describes {last} bytes of data, the file holds"
            f" {size}; the first tensor past the end is {first!r}. Fetch the file again"
        )
    position = 0
    for entry in entries:
        if entry.begin != position:
            what = "overlaps the one before it" if entry.begin < position else "leaves a gap"
            raise CheckpointError(
                f"{where}: tensor {entry.name!r} starts at byte {entry.begin} of the data and"
                f" {what}, which ends at {position}; rewrite the file with safetensors"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{where}: {size - position} bytes after the last tensor belong to nothing;"
            " the file is damaged: fetch it again"
        )


# Write .safetensors files tensor by tensor; the same tensors give the same bytes.


KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Sequence[Planned],
    read: Callable[[Planned], np.ndarray],
    library: str = "pt",
) -> None:
    """Write one file; `read` is called for each tensor in turn, so that one is in memory.

    Args:
      library: whose layout the tensors have, as readers look it up: "pt" or "mlx".
    """
    entries = {}
    position = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(
        {"__metadata__": {"format": library}} | entries, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(flat_bytes(read(tensor)).data)


def write_shards(
    folder: Path,
    tensors: Sequence[Planned],
    read: Callable[[Planned], np.ndarray],
    most_bytes: int = 0,
    library: str = "pt",
) -> None:
    """Write the weights of a folder, in files of at most `most_bytes`, with their index last.

    Args:
      most_bytes: 0 for one file; a larger tensor has a file of its own.
      library: see `write_safetensors`.
    """
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if most_bytes and shards[-1] and size + tensor.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, tensors, read, library)
        return
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, read, library)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the row-major bytes of an array, uint8 [bytes]; a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
