"""Importance matrices: how large the inputs of a model's matrices are, in llama.cpp's files.

A file has, for each matrix by its name in GGUF files, the mean square of each input over the tokens
of a text; of stacked experts, over the tokens that chose each. There are two formats: GGUF with
sums and counts, and an older one of means times a number of calls.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dflash_jax.converters.formats.gguf.file import STRING, GgufArray, open_gguf
from dflash_jax.converters.formats.gguf.writer import U32, PlannedBlocks, Typed, write_gguf
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.formats.source import map_file
from dflash_jax.errors import CheckpointError

SUMS = ".in_sum2"
COUNTS = ".counts"
# Least share of the mean that an input counts: one that a text leaves at 0 may matter in others.
LEAST = 1e-4
MAX_ENTRIES = 1 << 20
MAX_NAME = 255


@dataclass(frozen=True)
class Importance:
    """An importance matrix.

    Attributes:
      means: mean squares by matrix, float32 [experts, inputs], or flat as the older format has
        them; 0 for experts that no token chose.
      text: name of the text.
      chunks: how many pieces of the text were used.
      where: the file, for messages.
    """

    means: Mapping[str, np.ndarray]
    text: str
    chunks: int
    where: str

    def of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Return how much inputs of a model's matrices count, float32 [experts, inputs].

        Their mean is 1, and what was not measured is 1.

        Args:
          shapes: shapes of the model's tensors, by name.

        Raises:
          CheckpointError: it belongs to another model.
        """
        matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        if unknown := [name for name in self.means if name not in matrices]:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise self._other(f"{unknown[0]}{more}, which this model lacks")
        weights = {}
        for name, means in self.means.items():
            *stack, _, inputs = matrices[name]
            if means.size != math.prod(stack) * inputs:
                count = math.prod(stack) * inputs
                raise self._other(f"{means.size} numbers for {name}, which has {count} inputs")
            weights[name] = _counted(means.reshape(-1, inputs))
        return weights

    def _other(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where} has {what}: it was measured on another model; measure one of this model"
            " with dflash-jax imatrix"
        )


def _counted(means: np.ndarray) -> np.ndarray:
    average = means.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.maximum(means / average, LEAST)
    return np.where(average > 0, relative, 1).astype(np.float32)


def read_importance(path: Path) -> Importance:
    """Return the importance matrix in a file of either format.

    Raises:
      CheckpointError: the file is none, or is damaged.
    """
    raw = map_file(path)
    importance = _read_gguf(path) if raw[:4] == b"GGUF" else _read_older(raw, str(path))
    for name, means in importance.means.items():
        if not np.isfinite(means).all() or (means < 0).any():
            raise CheckpointError(
                f"{path}: {name} has mean squares that are negative or not finite; measure them"
                " again"
            )
    return importance


def _read_gguf(path: Path) -> Importance:
    source = open_gguf(path)
    if source.metadata.get("general.type") != "imatrix":
        kind = source.metadata.get("general.type", "model")
        raise CheckpointError(
            f"{path} is a GGUF file of a {kind}, not an importance matrix (general.type imatrix)"
        )
    means = {}
    for stored in source.names():
        if not stored.endswith(SUMS):
            continue
        name = stored.removesuffix(SUMS)
        if name + COUNTS not in source.names():
            raise CheckpointError(f"{path} has {stored}, but no {name}{COUNTS}; it is damaged")
        sums = source.read(stored).astype(np.float32)
        counts = source.read(name + COUNTS).astype(np.float32).reshape(-1, 1)
        sums = sums.reshape(-1, sums.shape[-1])
        if len(counts) not in (1, len(sums)):
            raise CheckpointError(
                f"{path} has {len(counts)} counts for the {len(sums)} rows of {stored}; it is"
                " damaged"
            )
        with np.errstate(invalid="ignore", divide="ignore"):
            means[name] = np.where(counts == 0, np.float32(0), sums / counts)
    texts = source.metadata.get("imatrix.datasets")
    text = ", ".join(texts.tolist()) if isinstance(texts, GgufArray) and texts.count else ""
    chunks = source.metadata.get("imatrix.chunk_count", 0)
    return _checked(means, text, chunks if type(chunks) is int else 0, str(path))


def _read_older(raw: Any, where: str) -> Importance:
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        if not 0 <= count <= len(raw) - at:
            raise CheckpointError(
                f"{where} is no importance matrix, neither in GGUF nor in llama.cpp's older format,"
                f" or is cut off: {count} bytes are missing after byte {at}"
            )
        at += count
        return raw[at - count : at]

    def number(most: int) -> int:
        value = struct.unpack("<i", take(4))[0]
        if not 0 <= value <= most:
            raise CheckpointError(
                f"{where} is no importance matrix, neither in GGUF nor in llama.cpp's older format:"
                f" a count of {value} before byte {at}"
            )
        return value

    means = {}
    for _ in range(number(MAX_ENTRIES)):
        name = take(number(MAX_NAME)).decode("utf-8", "replace")
        calls = number(1 << 30)
        count = number(1 << 28)
        means[name] = np.frombuffer(take(4 * count), "<f4") / np.float32(max(calls, 1))
    chunks = 0
    text = ""
    if at < len(raw):  # older files end here
        chunks = number(1 << 30)
        text = take(number(1 << 16)).decode("utf-8", "replace")
    return _checked(means, text, chunks, where)


def _checked(means: dict[str, np.ndarray], text: str, chunks: int, where: str) -> Importance:
    if not means:
        raise CheckpointError(f"{where} has no measured matrices; measure them again")
    return Importance(means, text, chunks, where)


@dataclass(frozen=True)
class MeasuredInputs:
    """Sums of squares of the inputs of matrices, [experts, inputs], over `counts` tokens each."""

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]  # [experts, 1]
    text: str
    chunks: int
    chunk: int  # tokens of each

    def write(self, file: BinaryIO, *, older: bool) -> None:
        """Write llama.cpp's GGUF format, or its older one, which has no experts without tokens."""
        if older:
            self._write_older(file)
        else:
            self._write_gguf(file)

    def _write_gguf(self, file: BinaryIO) -> None:
        metadata = {
            "general.type": Typed(STRING, "imatrix"),
            "imatrix.datasets": Typed(STRING, [self.text]),
            "imatrix.chunk_count": Typed(U32, self.chunks),
            "imatrix.chunk_size": Typed(U32, self.chunk),
        }
        arrays = {}
        for name in sorted(self.sums):
            arrays[name + SUMS] = np.ascontiguousarray(self.sums[name], "<f4")
            arrays[name + COUNTS] = np.ascontiguousarray(self.counts[name], "<f4")
        planned = [PlannedBlocks(n, BY_NAME["F32"], array.shape) for n, array in arrays.items()]
        write_gguf(file, metadata, planned, lambda tensor: arrays[tensor.name])

    def _write_older(self, file: BinaryIO) -> None:
        names = [name for name in sorted(self.sums) if self.counts[name].all()]
        file.write(struct.pack("<i", len(names)))
        for name in names:
            means = self.sums[name] / self.counts[name] * self.chunks
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw)
            file.write(struct.pack("<ii", self.chunks, means.size))
            file.write(np.ascontiguousarray(means, "<f4").tobytes())
        text = self.text.encode()
        file.write(struct.pack("<ii", self.chunks, len(text)) + text)
