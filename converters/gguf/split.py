"""Divide a GGUF file into a set of files, and join such a set, as gguf-split of llama.cpp does."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.converters.formats.gguf.file import (
    MAX_SHARDS,
    SHARD,
    GgufFile,
    TensorInfo,
    open_gguf,
    round_up,
)
from dflash_jax.converters.formats.gguf.writer import (
    ALIGNMENT,
    I32,
    U16,
    U32,
    PlannedBlocks,
    Typed,
    head_bytes,
    stored_keys,
    write_gguf,
)
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.utils.atomic import new_path

MOST_TENSORS = 128  # most in a file if no size is chosen; gguf-split has the same
ALIGNED = "general.alignment"
Progress = Callable[[str, int], object]


@dataclass(frozen=True)
class Division:
    """How a file is divided: at most so many bytes, or else tensors, in each part.

    Attributes:
      empty_first: whether the first part holds the metadata alone.
    """

    most_bytes: int = 0
    most_tensors: int = 0
    empty_first: bool = False


def part_path(prefix: Path, number: int, count: int) -> Path:
    """Return the path of a part, numbered from 1."""
    return prefix.with_name(f"{prefix.name}-{number:05d}-of-{count:05d}.gguf")


def split(
    path: Path,
    prefix: Path,
    division: Division,
    *,
    dry_run: bool = False,
    progress: Progress = lambda name, weights: None,
) -> dict[str, Any]:
    """Write the parts of a GGUF file as PREFIX-00001-of-0000N.gguf; return what they hold.

    The first part appears last, so that a set is complete as soon as it can be opened.

    Raises:
      CheckpointError: the file is damaged, or a part exists or cannot be written.
      ConfigError: it would become too many parts.
    """
    source = open_gguf(path)
    if prefix.suffix.lower() == ".gguf":
        prefix = prefix.with_suffix("")
    keys = _own_keys(source)
    parts = _parts(source, keys, division)
    if len(parts) > MAX_SHARDS:
        raise ConfigError(
            f"{path} would become {len(parts)} files, and at most {MAX_SHARDS} are read; choose a"
            " larger size"
        )
    places = [part_path(prefix, i + 1, len(parts)) for i in range(len(parts))]
    sizes = [sum(info.nbytes for info in part) for part in parts]
    report: dict[str, Any] = {
        "parts": [
            {"path": str(place), "tensors": len(part), "bytes": size}
            for place, part, size in zip(places, parts, sizes, strict=True)
        ]
    }
    if dry_run:
        return report
    total = sum(len(part) for part in parts)
    with _all_or_none(places, sum(sizes)) as temporary:
        for number, (at, part) in enumerate(zip(temporary, parts, strict=True)):
            own = keys if number == 0 else {k: v for k, v in keys.items() if k == ALIGNED}
            own |= {
                "split.no": Typed(U16, number),
                "split.count": Typed(U16, len(parts)),
                "split.tensors.count": Typed(I32, total),
            }
            _write(at, own, part, source, progress)
    return report


def merge(
    path: Path,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda name, weights: None,
) -> dict[str, Any]:
    """Write a set as one file, given its first one; return what it holds.

    Raises:
      CheckpointError: a file of the set is missing or damaged, or the new one cannot be written.
      ConfigError: it is no set.
    """
    source = open_gguf(path)
    if "split.count" not in source.metadata:
        raise ConfigError(f"{path} is one file and no set; there is nothing to merge")
    if SHARD.fullmatch(output.name):
        raise ConfigError(f"{output} is named like a part of a set; choose another name")
    if output.suffix.lower() != ".gguf":
        raise ConfigError(f"{output} is to be a GGUF file; give a name that ends in .gguf")
    infos = _infos(source)
    size = sum(info.nbytes for info in infos)
    with new_path(output, overwrite=overwrite, needed=size) as at:
        _write(at, _own_keys(source), infos, source, progress)
    return {"path": str(output), "parts": len(source.shards), "tensors": len(infos), "bytes": size}


def _own_keys(source: GgufFile) -> dict[str, Typed]:
    """Return the metadata of a whole file; an alignment that readers assume is left out."""
    every = stored_keys(source.shards[0].header)
    return {key: value for key, value in every.items() if not key.startswith("split.")}


def _infos(source: GgufFile) -> list[TensorInfo]:
    return [info for shard in source.shards for info in shard.header.tensors]


def _parts(source: GgufFile, keys: dict[str, Typed], division: Division) -> list[list[TensorInfo]]:
    """Return the tensors of each part."""
    most = division.most_tensors or (0 if division.most_bytes else MOST_TENSORS)
    alignment = source.shards[0].header.alignment
    parts: list[list[TensorInfo]] = [[]]
    if division.empty_first:
        parts.append([])
    size = 0 if division.empty_first else len(head_bytes(keys, []))
    for info in _infos(source):
        needed = round_up(info.nbytes, alignment)
        full = most and len(parts[-1]) == most
        full = full or (division.most_bytes and size + needed > division.most_bytes)
        if full and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(info)
        size += needed
    return parts


@contextlib.contextmanager
def _all_or_none(places: list[Path], needed: int) -> Iterator[list[Path]]:
    """Yield temporary paths of new files, which appear when the block succeeds, the first last."""
    if there := [place for place in places if place.exists()]:
        raise CheckpointError(f"{there[0]} exists; choose another name, or remove the old set")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(new_path(place, overwrite=False, needed=needed if i == 0 else 0))
            for i, place in enumerate(places)
        ]


def _write(
    at: Path,
    keys: dict[str, Typed],
    infos: list[TensorInfo],
    source: GgufFile,
    progress: Progress,
) -> None:
    planned = [PlannedBlocks(info.name, info.kind, info.shape) for info in infos]
    alignment = keys.get(ALIGNED, Typed(U32, ALIGNMENT)).value

    def read(planned: PlannedBlocks) -> np.ndarray:
        progress(planned.name, math.prod(planned.shape))
        trim_mapped_memory(source)
        return source.raw(planned.name)

    with at.open("wb") as file:
        write_gguf(file, keys, planned, read, alignment=alignment)
