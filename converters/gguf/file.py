"""GGUF files and split sets as sources of lazily decoded tensors."""

import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.converters import quants
from dflash_jax.converters.gguf.header import GgufHeader, TensorInfo, parse
from dflash_jax.converters.source import Rows, map_file
from dflash_jax.errors import CheckpointError

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
        found = {}
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
            found[name] = scale
        return found

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

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes, uint8 [rows, bytes of a row], a view of the mapped file."""
        info, shard = self._find(name)
        row = info.shape[-1] // info.kind.block_size * info.kind.block_bytes
        start = shard.header.data_start + info.offset
        return np.frombuffer(shard.buffer, np.uint8, info.nbytes, start).reshape(-1, row)

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
        decoded = self._decoded(info, raw[rows])
        return decoded * self._scale_of(info, rows) if name in self._scales else decoded

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
    prefix, (of, suffix) = match["prefix"], match.group("of", "suffix")
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
    found = sum(len(shard.header.tensors) for shard in shards)
    if expected is not None and expected != found:
        raise CheckpointError(
            f"{shards[0].path}: the set should hold {expected} tensors, its files hold {found};"
            " fetch the set again"
        )
