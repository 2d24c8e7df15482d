"""Hugging Face weight folders: one model.safetensors or shards, plain or quantised."""

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config.fields import (
    gguf_advice,
    has_file,
)
from dflash_jax.converters.formats.safetensors import (
    INDEX,
    SINGLE,
    SafetensorsFile,
    open_safetensors,
)
from dflash_jax.converters.formats.source import Rows, TensorSource
from dflash_jax.errors import CheckpointError

ADAPTER = "adapter_config.json"  # a low-rank adapter, to be added to another model
ADAPTER_ADVICE = "it holds an adapter: give its base model, and this folder as --lora or lora="


class ShardedSafetensors:
    """Shards, presented as one `TensorSource`."""

    def __init__(self, path: Path, home: dict[str, SafetensorsFile], notes: tuple[str, ...]):
        self.path = path
        self.notes = notes
        self._home = home

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self._shard(name).dtype(name)

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self._shard(name).kind(name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        return self._shard(name).nbytes(name)

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """Return the mapped files."""
        return tuple(buffer for shard in set(self._home.values()) for buffer in shard.buffers)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        return self._shard(name).read(name)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return self._shard(name).read_rows(name, rows)

    def _shard(self, name: str) -> SafetensorsFile:
        try:
            return self._home[name]
        except KeyError:
            raise CheckpointError(f"no shard of {self.path} holds a tensor {name!r}") from None


def open_directory(path: str | Path) -> TensorSource:
    """Open the weights of a folder, in one file or in shards.

    Raises:
      CheckpointError: the folder holds no weights, or its shards do not fit their index.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give one that holds {SINGLE}")
    if has_file(path / SINGLE):  # takes precedence over an index, as in transformers
        return open_safetensors(path / SINGLE)
    if has_file(path / INDEX):
        return _open_sharded(path)
    if advice := gguf_advice(path):
        raise CheckpointError(f"{path} {advice}")
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; {_instead(path)}")


def ignored_index(path: Path) -> str:
    """Return a warning about shards that are not read, as a single file has precedence, or ""."""
    if not (has_file(path / SINGLE) and has_file(path / INDEX)):
        return ""
    shards = set(_read_index(path / INDEX)[0].values()) - {SINGLE}
    if not shards:
        return ""
    return (
        f"{path / SINGLE} is read, and the {len(shards)} shards that {INDEX} names are not: remove"
        " the one that is out of date"
    )


def _instead(path: Path) -> str:
    """Return advice for a folder that has no weights under their usual name."""
    names = sorted(p.name for p in path.iterdir())
    if ADAPTER in names:
        return ADAPTER_ADVICE
    if other := [name for name in names if name.endswith(".safetensors")]:
        return f"rename {other[0]} if it holds all weights, or fetch the index of the shards"
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return f"{pickles[0]} is a pickle, which is never opened: fetch the safetensors files"
    return "fetch one of them, or give the folder that does"


def _open_sharded(path: Path) -> ShardedSafetensors:
    weight_map, total = _read_index(path / INDEX)
    present = {place.name for place in path.iterdir()}
    shards: dict[str, SafetensorsFile] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in {".", ".."} or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{path / INDEX} names the shard {file!r}; a shard must be a plain file name"
            )
        if file not in present:  # compared by name, which may be too long for a path
            raise CheckpointError(f"{path} lacks the shard {file}; fetch it again")
        shards[file] = open_safetensors(path / file)
    _check_map(path, weight_map, shards)
    stored = sum(shard.nbytes(name) for shard in shards.values() for name in shard.names())
    home = {name: shards[file] for name, file in weight_map.items()}
    if total in (None, stored):
        return ShardedSafetensors(path, home, ())
    return ShardedSafetensors(path, home, (f"index says {total} bytes, shards hold {stored}",))


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or any(type(v) is not str for v in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor to file; fetch it again")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total


def _check_map(path: Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]) -> None:
    stored: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.names():
            if name in stored:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in {stored[name]} and in {file}; keep one"
                )
            stored[name] = file
    wrong = sorted(n for n in set(weight_map) | set(stored) if weight_map.get(n) != stored.get(n))
    if wrong:
        lines = [
            f"  {n}: index says {weight_map.get(n, 'nothing')}, found in {stored.get(n, 'none')}"
            for n in wrong
        ]
        raise CheckpointError(
            f"{path / INDEX} and the shards disagree on {len(wrong)} tensors; fetch them again\n"
            + "\n".join(lines[:50])
        )
