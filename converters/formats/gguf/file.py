"""GGUF files and split sets: their headers, and their tensors, decoded lazily."""

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.converters.formats import quants
from dflash_jax.converters.formats.quants.types import REMOVED, TYPES, GgmlType
from dflash_jax.converters.formats.source import Rows, map_file, trim_mapped_memory
from dflash_jax.errors import CheckpointError

# GGUF headers, versions 2 and 3, little-endian: every length is checked before use.
#
# Layout and limits follow the published format; the limits on counts are ours.


MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY = (1 << 16) - 1  # bytes
MAX_NAME = 255  # bytes
MAX_STRING = 1 << 30  # bytes
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 63
SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes of a key with a name of one byte and a value of one
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # bytes of a vector with a name of one byte

STRING = 8
ARRAY = 9
SCALARS: dict[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, eq=False)
class GgufArray:
    """An array of metadata that is decoded on demand."""

    kind: int
    count: int
    _buffer: mmap.mmap | bytes
    _start: int
    _stop: int
    _where: str

    @property
    def raw(self) -> bytes:
        """The bytes of the elements, as they are stored."""
        return self._buffer[self._start : self._stop]

    def __len__(self) -> int:
        return self.count

    def tolist(self) -> list[Any]:
        """Return the elements as Python values.

        Raises:
          CheckpointError: a string is not UTF-8.
        """
        if self.kind == STRING:
            return list(self._strings)
        dtype = np.dtype(SCALARS[self.kind])
        return np.frombuffer(self._buffer, dtype, self.count, self._start).tolist()

    @functools.cached_property
    def _strings(self) -> tuple[str, ...]:
        """The strings, decoded once: a vocabulary of 50,000 takes 50 ms, and has three readers."""
        values = []
        position = self._start
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            (length,) = length_at(self._buffer, position)
            raw = self._buffer[position + 8 : position + 8 + length]
            try:
                values.append(raw.decode())
            except UnicodeDecodeError:
                raise CheckpointError(
                    f"{self._where}: element {len(values)} is not UTF-8: {raw[:40]!r};"
                    " the file is damaged: fetch it again"
                ) from None
            position += 8 + length
        return tuple(values)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its shape, outermost axis first, and its bytes in the data section."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return math.prod(self.shape) // self.kind.block_size * self.kind.block_bytes


@dataclass(frozen=True)
class KeyPlace:
    """The place of a key and its value in a file, and the type of the value."""

    kind: int
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header. `notes` are oddities for a report.

    Attributes:
      places: where each key of the metadata lies.
      keys_stop, stop: the ends of the metadata, and of the list of tensors after it.
    """

    version: int
    metadata: dict[str, Any]
    places: dict[str, KeyPlace]
    keys_stop: int
    stop: int
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_start: int
    notes: tuple[str, ...]


class _Cursor:
    """A forward reader that stays within its buffer."""

    def __init__(self, buffer: mmap.mmap | bytes, where: str):
        self.buffer = buffer
        self.where = where
        self.position = 0

    def left(self) -> int:
        return len(self.buffer) - self.position

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {what} (byte {self.position} of {len(self.buffer)});"
            " the file is damaged or not GGUF: fetch it again"
        )

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes and return their start."""
        if count > self.left():
            raise self.fail(f"{what} needs {count} bytes but {self.left()} are left")
        start = self.position
        self.position += count
        return start

    def number(self, form: str, what: str) -> Any:
        start = self.skip(struct.calcsize(form), what)
        return struct.unpack_from(form, self.buffer, start)[0]

    def text(self, limit: int, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} claims {length} bytes; at most {limit} are allowed")
        start = self.skip(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


def parse(buffer: mmap.mmap | bytes, where: str) -> GgufHeader:
    """Parse the header of a whole file.

    Raises:
      CheckpointError: the header is malformed; the message names the place.
    """
    cursor = _Cursor(buffer, where)
    version, tensor_count, key_count = _preamble(cursor)
    metadata, places = _metadata(cursor, key_count)
    keys_stop = cursor.position
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
        raise cursor.fail(f"general.alignment is {alignment!r}; expected a power of two")
    if alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}; expected a power of two")
    if tensor_count * SMALLEST_TENSOR > cursor.left():
        raise cursor.fail(f"{tensor_count} tensors do not fit in {cursor.left()} bytes")
    tensors = tuple(_tensor(cursor, alignment) for _ in range(tensor_count))
    _check_names(cursor, tensors)
    data_start = round_up(cursor.position, alignment)
    return GgufHeader(
        version=version,
        metadata=metadata,
        places=places,
        keys_stop=keys_stop,
        stop=cursor.position,
        tensors=tensors,
        alignment=alignment,
        data_start=data_start,
        notes=_check_extents(cursor, tensors, data_start, alignment),
    )


def parse_metadata(raw: bytes, where: str) -> dict[str, Any]:
    """Return the metadata of a header without its tensors."""
    cursor = _Cursor(raw, where)
    _, _, count = _preamble(cursor)
    return _metadata(cursor, count)[0]


def round_up(position: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `position`."""
    return -(-position // alignment) * alignment


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    if cursor.left() < 24:
        raise cursor.fail(f"a GGUF file has at least 24 bytes, this one {cursor.left()}")
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        raise cursor.fail(f"starts with {magic!r}; expected b'GGUF'")
    cursor.skip(4, "the magic")
    version = cursor.number("<I", "the version")
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{cursor.where} is big-endian GGUF, which is not supported; convert it with"
            " gguf-convert-endian or fetch the little-endian file"
        )
    if version == 1:
        raise CheckpointError(
            f"{cursor.where} is GGUF version 1, which is obsolete; versions 2 and 3 are supported:"
            " convert the model again, or fetch a newer file"
        )
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = cursor.number("<Q", "the tensor count")
    key_count = cursor.number("<Q", "the key count")
    if tensor_count > MAX_TENSORS:
        raise cursor.fail(f"claims {tensor_count} tensors; at most {MAX_TENSORS} are allowed")
    if key_count > MAX_KEYS or key_count * SMALLEST_KEY > cursor.left():
        raise cursor.fail(f"claims {key_count} metadata keys, which cannot fit")
    return version, tensor_count, key_count


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, KeyPlace]]:
    """Return the values of all keys, and the places of these."""
    values: dict[str, Any] = {}
    places: dict[str, KeyPlace] = {}
    for _ in range(count):
        start = cursor.position
        key = cursor.text(MAX_KEY, "a metadata key")
        if not key or not key.isprintable():
            raise cursor.fail(f"the metadata key {key!r} is empty or unprintable")
        if key in values:
            raise cursor.fail(f"the metadata key {key!r} appears twice")
        kind = cursor.number("<I", f"the type of {key}")
        values[key] = _value(cursor, key, kind)
        places[key] = KeyPlace(kind, start, cursor.position)
    return values, places


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind in SCALARS:
        return cursor.number(SCALARS[kind], key)
    if kind == STRING:
        return cursor.text(MAX_STRING, key)
    if kind == ARRAY:
        return _array(cursor, key)
    raise cursor.fail(f"{key} has the unknown value type {kind}")


def _array(cursor: _Cursor, key: str) -> GgufArray:
    kind = cursor.number("<I", f"the element type of {key}")
    count = cursor.number("<Q", f"the length of {key}")
    if kind not in SCALARS and kind != STRING:
        raise cursor.fail(f"{key} is an array of type {kind}; only plain values and strings may be")
    size = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
    if count > MAX_STRING or count * size > cursor.left():
        raise cursor.fail(f"{key} claims {count} elements but {cursor.left()} bytes are left")
    start = cursor.position
    if kind == STRING:
        _skip_strings(cursor, count, key)
    else:
        cursor.skip(count * size, key)
    return GgufArray(kind, count, cursor.buffer, start, cursor.position, f"{cursor.where}: {key}")


def _skip_strings(cursor: _Cursor, count: int, key: str) -> None:
    """Return the end of an array of strings; half a million take about 0.1 s."""
    buffer = cursor.buffer
    end = len(cursor.buffer)
    position = cursor.position
    read = struct.Struct("<Q").unpack_from
    for i in range(count):
        if position + 8 > end:
            cursor.position = position
            raise cursor.fail(f"{key} ends inside element {i} of {count}")
        position += 8 + read(buffer, position)[0]
    if position > end:
        raise cursor.fail(f"{key}: its {count} strings reach to byte {position}")
    cursor.position = position


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.text(MAX_NAME, "a tensor name")
    if not name or not name.isprintable() or "/" in name or "\\" in name or ".." in name:
        raise cursor.fail(f"the tensor name {name!r} is empty, unprintable or a path")
    dims = cursor.number("<I", f"the dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{name} has {dims} dimensions; expected 1 to {MAX_DIMS}")
    shape = tuple(cursor.number("<Q", f"the shape of {name}") for _ in range(dims))
    kind = _kind(cursor, name, cursor.number("<I", f"the type of {name}"))
    offset = cursor.number("<Q", f"the offset of {name}")
    if 0 in shape or math.prod(shape) >= MAX_ELEMENTS:
        raise cursor.fail(f"{name} has the impossible shape {shape[::-1]}")
    if shape[0] % kind.block_size:
        raise cursor.fail(
            f"{name} has rows of {shape[0]} weights; {kind.name} packs {kind.block_size} at a time"
        )
    if offset % alignment:
        raise cursor.fail(f"{name} starts at {offset}, not a multiple of {alignment}")
    return TensorInfo(name, kind, shape[::-1], offset)


def _kind(cursor: _Cursor, name: str, number: int) -> GgmlType:
    if number in TYPES:
        return TYPES[number]
    known = "was removed from the format" if number in REMOVED else "is unknown"
    raise CheckpointError(
        f"{cursor.where}: {name} has the type {number}, which {known}; known are "
        + ", ".join(f"{n} {t.name}" for n, t in sorted(TYPES.items()))
    )


def _check_names(cursor: _Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise cursor.fail(f"the tensor {tensor.name!r} appears twice")
        seen.add(tensor.name)


def _check_extents(
    cursor: _Cursor, tensors: tuple[TensorInfo, ...], data_start: int, alignment: int
) -> tuple[str, ...]:
    """Check for truncated data and overlapping tensors; gaps and trailing bytes are noted."""
    size = len(cursor.buffer)
    needed = data_start + max((t.offset + t.nbytes for t in tensors), default=0)
    if tensors and needed > size:
        first = next(t.name for t in tensors if data_start + t.offset + t.nbytes > size)
        raise CheckpointError(
            f"{cursor.where} is truncated: the header describes {needed} bytes, the file has"
            f" {size}; the first tensor past the end is {first}. Fetch the file again"
        )
    end = 0
    gaps = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            raise cursor.fail(f"{tensor.name} overlaps the tensor before it")
        gaps += tensor.offset - round_up(end, alignment)
        end = tensor.offset + tensor.nbytes
    notes = [f"{gaps} bytes between tensors belong to nothing"] if gaps else []
    if tensors and size > data_start + round_up(end, alignment):
        notes.append(f"{size - data_start - end} bytes follow the last tensor")
    return tuple(notes)


SHARD = re.compile(
    r"(?P<prefix>.*)-(?P<number>\d{5})-(?P<of>of)-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE
)
MAX_SHARDS = 4096
SCALED = frozenset({"NVFP4"})  # types whose tensors may have a separate scale
ACTIVATION_SCALE = ".input_scale"


@dataclass(frozen=True)
class Shard:
    """One mapped file and its header."""

    path: Path
    buffer: mmap.mmap
    header: GgufHeader


class GgufFile:
    """One GGUF file, or a split set, as a `TensorSource`."""

    def __init__(self, shards: list[Shard]):
        self.path = shards[0].path
        self.shards = tuple(shards)
        self.metadata: dict[str, Any] = shards[0].header.metadata
        self.notes = tuple(f"{s.path.name}: {n}" for s in shards for n in s.header.notes)
        self._tensors: dict[str, tuple[TensorInfo, Shard]] = {}
        for shard in shards:
            for info in shard.header.tensors:
                if info.name in self._tensors:
                    other = self._tensors[info.name][1].path.name
                    raise CheckpointError(
                        f"{shard.path}: tensor {info.name!r} is also in {other}; fetch both again"
                    )
                self._tensors[info.name] = (info, shard)
        self._scales = self._find_scales()
        stems = {name.removesuffix(".weight") for name in self._tensors}
        unused = {n for n in stems if n.endswith(ACTIVATION_SCALE)}
        unused = {n for n in unused if n.removesuffix(ACTIVATION_SCALE) in stems}
        self._beside = {*self._scales.values(), *unused}
        if self._scales:
            self.notes += (f"{len(self._scales)} tensors are multiplied by the scale beside them",)
        if unused:
            self.notes += (f"{len(unused)} scales of activations are not used",)

    def _find_scales(self) -> dict[str, str]:
        """Return tensors that have a separate scale, one number or one for each expert."""
        scales = {}
        gemma = self.metadata.get("general.architecture") == "gemma4"
        for name, (info, _) in self._tensors.items():
            stem = name.removesuffix(".weight")
            spellings = (f"{stem}.scale", f"{name}.scale")
            scale = next((spelt for spelt in spellings if spelt in self._tensors), None)
            if info.kind.name not in SCALED or scale is None:
                continue
            if gemma and stem.endswith("ffn_down_exps"):
                continue  # in Gemma, the router's scales have this name
            beside = self._tensors[scale][0]
            sizes = {(1,), info.shape[:-2]}
            if beside.shape not in sizes or beside.kind.dtype is None:
                raise CheckpointError(
                    f"{self.path}: {scale} is {beside.kind.name} {list(beside.shape)} beside {name}"
                    f" {list(info.shape)}; expected one number, or one for each expert"
                )
            scales[name] = scale
        return scales

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(name for name in self._tensors if name not in self._beside)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._find(name)[0].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self._find(name)[0].kind.dtype or np.dtype(np.float32)

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self._find(name)[0].kind.name

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        return self._find(name)[0].nbytes

    def has_scale(self, name: str) -> bool:
        """Return whether a tensor is multiplied by the scale beside it."""
        return name in self._scales

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes, uint8 [rows, bytes of a row], a view of the mapped file.

        They are those of the tensor without the scale beside it.
        """
        info, shard = self._find(name)
        row = info.shape[-1] // info.kind.block_size * info.kind.block_bytes
        start = shard.header.data_start + info.offset
        return np.frombuffer(shard.buffer, np.uint8, info.nbytes, start).reshape(-1, row)

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """Return the mapped files."""
        return tuple(shard.buffer for shard in self.shards)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        shape = self.shape(name)
        rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        return self.read_rows(name, slice(0, rows)).reshape(shape)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        info = self._find(name)[0]
        raw = self.raw(name)
        if info.kind.dtype is not None:
            plain = raw.view(info.kind.dtype)
            return (plain if len(info.shape) > 1 else plain.reshape(-1, 1))[rows]
        if len(info.shape) == 1:
            return self._decoded(info, raw).reshape(-1, 1)[rows]
        chosen = raw[rows]
        decoded = self._decoded(info, chosen)
        trim_mapped_memory(chosen)
        if name in self._scales:
            decoded *= self._scale_of(info, rows)
        return decoded

    def _scale_of(self, info: TensorInfo, rows: Rows) -> np.ndarray:
        """Return the scales of chosen rows, float32 [rows, 1]."""
        scale = self.read(self._scales[info.name]).astype(np.float32)
        each = np.repeat(scale, math.prod(info.shape[:-1]) // len(scale))
        return each[rows][:, None]

    def _decoded(self, info: TensorInfo, raw: np.ndarray) -> np.ndarray:
        if info.kind.name not in quants.READABLE:
            raise CheckpointError(f"{self.path}: {info.name}: {quants.unreadable(info.kind.name)}")
        out = np.empty((len(raw), info.shape[-1]), np.float32)
        quants.decode(info.kind, raw, out)
        return out

    def _find(self, name: str) -> tuple[TensorInfo, Shard]:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None


def open_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF file, or the split set that it is the first file of.

    Raises:
      CheckpointError: a file is missing, truncated or malformed.
    """
    first = _open(Path(path))
    count = first.header.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{path}: split.count is {count!r}; expected 1 to {MAX_SHARDS}")
    if count <= 1:
        return GgufFile([first])
    shards = [first, *(_open(p) for p in _other_shards(first, count))]
    for i, shard in enumerate(shards):
        place = tuple(shard.header.metadata.get(f"split.{key}") for key in ("no", "count"))
        if place != (i, count):
            raise CheckpointError(
                f"{shard.path} says it is part {place[0]} of {place[1]} (from 0); expected part"
                f" {i} of {count}: fetch the set again"
            )
    _check_total(shards)
    return GgufFile(shards)


def _open(path: Path) -> Shard:
    buffer = map_file(path)
    header = parse(buffer, str(path))
    return Shard(path, buffer, header)


def _other_shards(first: Shard, count: int) -> list[Path]:
    match = SHARD.fullmatch(first.path.name)
    number = first.header.metadata.get("split.no")
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{first.path} belongs to a set of {count} files but is not named"
            f" NAME-00001-of-{count:05d}.gguf; rename the set as it was published"
        )
    prefix, of, suffix = match.group("prefix", "of", "suffix")
    if number != 0 or int(match["number"]) != 1:
        raise CheckpointError(
            f"{first.path} is not the first of its set;"
            f" give {prefix}-00001-{of}-{count:05d}{suffix}"
        )
    paths = [
        first.path.with_name(f"{prefix}-{i:05d}-{of}-{count:05d}{suffix}")
        for i in range(2, count + 1)
    ]
    if missing := [p.name for p in paths if not p.is_file()]:
        raise CheckpointError(f"{first.path.parent} lacks {', '.join(missing)}; fetch them")
    return paths


def _check_total(shards: list[Shard]) -> None:
    expected = shards[0].header.metadata.get("split.tensors.count")
    held = sum(len(shard.header.tensors) for shard in shards)
    if expected is not None and expected != held:
        raise CheckpointError(
            f"{shards[0].path}: the set should hold {expected} tensors, its files hold {held};"
            " fetch the set again"
        )
