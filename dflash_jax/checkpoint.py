"""The checkpoint format of dflash_jax.

 Compressing weights takes longer than writing them, and saves little.
    options: dict.*?
NAME/checkpoint.json   the config; shapes, dtypes, file sizes and checksums
    NAME/weights/          the parameter tree, written by orbax
    NAME/tokenizer.json    and other files that belong to the model

A parameter tree consists of nested dicts of NumPy or JAX arrays. Orbax, and with it JAX, is
imported only when weights are written or read.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from dflash_jax.config import ALWAYS_FLOAT32, AttentionConfig
from dflash_jax.config.fields import has_file
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import config_classes
from dflash_jax.utils.atomic import MANIFEST, copy_companions, new_path
from dflash_jax.utils.command import uninterrupted

Params = dict[str, Any]
Keys = tuple[str, ...]  # path of a leaf

WEIGHTS = "weights"
FORMAT = "dflash_jax checkpoint"
VERSION = 1
FLOATS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
DTYPES = FLOATS | {"int32": np.dtype(np.int32)}
BLOCK = 1 << 24  # bytes read at a time for a checksum
BATCH = 1 << 26  # bytes of arrays that orbax reads at a time: it holds them twice meanwhile


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A stored parameter."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array to be written, which is made only then."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read and whose files have the sizes stated there."""

    path: Path
    config: AttentionConfig
    leaves: Mapping[Keys, Leaf]
    checksums: Mapping[str, int]  # checksums of the files below `weights`

    def load(self, dtype: str | None = None) -> Params:
        """Return the parameter tree as NumPy arrays, floating-point ones cast to `dtype` if given.

        Parameters named in `ALWAYS_FLOAT32` are cast to float32 instead.

        Raises:
          CheckpointError: a file is damaged, or does not hold the parameters of the manifest.
          ConfigError: the dtype is unknown.
        """
        self.verify()
        arrays: dict[Keys, np.ndarray] = {}
        for batch in batches(self.leaves):
            arrays |= self.read(batch, dtype)
        return _nested(arrays)

    def read(self, chosen: Iterable[Keys], dtype: str | None = None) -> dict[Keys, np.ndarray]:
        """Return some parameters by path, after `verify`; see `load`."""
        wanted = {keys: _read_dtype(keys, self.leaves[keys], dtype) for keys in chosen}
        try:
            leaves = dict(_flat(read_arrays(self.path / WEIGHTS, wanted, partial=True)))
        except Exception as error:  # orbax and tensorstore raise many kinds
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self.path / WEIGHTS} cannot be read ({reason}); convert the model again"
            ) from error
        for keys, kind in wanted.items():
            array = leaves.get(keys)
            leaf = self.leaves[keys]
            there = isinstance(array, np.ndarray)  # orbax leaves numbers for missing ones
            if not there or array.shape != leaf.shape or array.dtype != kind:
                said = f"{array.dtype} {list(array.shape)}" if there else "missing"
                raise CheckpointError(
                    f"{self.path}: {'/'.join(keys)} is {said}, its manifest says"
                    f" {list(leaf.shape)}; convert the model again"
                )
        return leaves

    def verify(self) -> None:
        """Check the files by their checksums.

        Raises:
          CheckpointError: one is damaged.
        """
        files = list(self.checksums)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            sums = pool.map(checksum, [self.path / WEIGHTS / name for name in files])
            for name, actual in zip(files, sums, strict=True):
                if actual != self.checksums[name]:
                    raise CheckpointError(
                        f"{self.path / WEIGHTS / name} is damaged (its checksum is wrong); copy"
                        " the checkpoint again or convert the model again"
                    )


K = TypeVar("K")


def batches(leaves: Mapping[K, Leaf]) -> Iterator[list[K]]:
    """Yield the names of arrays, those of about `BATCH` bytes together."""
    batch: list[K] = []
    size = 0
    for name, leaf in leaves.items():
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if batch and size + nbytes > BATCH:
            yield batch
            batch = []
            size = 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has the manifest of a checkpoint.

    Raises:
      CheckpointError: the manifest is not a file.
    """
    return has_file(path / MANIFEST)


def save(
    path: Path,
    config: AttentionConfig,
    params: Params,
    *,
    companions: Mapping[str, str | Path] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint to `path`, completely or not at all.

    Args:
      params: the parameter tree of `config`, with weights in any layout.
      companions: other files of the model by name, as texts or as paths to copy.

    Raises:
      CheckpointError: `path` exists and may not be overwritten, parameters are packed, or the disk
        is full.
    """
    arrays = {keys: np.asarray(leaf) for keys, leaf in _flat(params)}
    needed = sum(array.nbytes for array in arrays.values())
    with new_path(path, overwrite=overwrite, needed=needed) as place:
        write(place, config, _nested(arrays), companions or {})


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Raises:
      CheckpointError: it has another format or a later version, or is incomplete or inconsistent.
    """
    manifest = _manifest(path / MANIFEST)
    try:
        config = _config(manifest["config"])
        leaves = {
            tuple(entry["path"]): Leaf(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            for entry in manifest["parameters"]
        }
        sizes = {name: int(entry["bytes"]) for name, entry in manifest["files"].items()}
        checksums = {name: int(entry["crc32"]) for name, entry in manifest["files"].items()}
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be understood ({type(error).__name__}: {error}); convert"
            " the model again"
        ) from error
    _check_files(path / WEIGHTS, sizes)
    return Checkpoint(path, config, leaves, checksums)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); give a checkpoint folder"
        ) from None
    stated = manifest.get("format") if isinstance(manifest, dict) else None
    if stated != FORMAT or type(manifest.get("version")) is not int:
        raise CheckpointError(f"{path} has format {stated!r}; expected {FORMAT!r}")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has version {manifest['version']}; this program reads up to {VERSION}: update"
            " dflash_jax"
        )
    return manifest


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder.parent / MANIFEST} names the file {name!r} outside it")
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long"
            raise CheckpointError(
                f"{file} is {state}, expected {size} bytes; copy the checkpoint again"
            )


def write(
    place: Path, config: AttentionConfig, params: Params, companions: Mapping[str, str | Path]
) -> None:
    """Write the folder, the manifest last: an incomplete folder is not a checkpoint.

    Args:
      params: arrays, or `LazyArray`s, of which one at a time is in memory.
    """
    place.mkdir()
    copy_companions(companions, place)
    arrays = {
        keys: leaf if isinstance(leaf, LazyArray) else np.asarray(leaf)
        for keys, leaf in _flat(params)
    }
    unknown = sorted({str(a.dtype) for a in arrays.values()} - set(DTYPES))
    if unknown:
        raise CheckpointError(
            f"parameters of {', '.join(unknown)}; expected {', '.join(DTYPES)}: packed ones cannot"
            " be saved, load the model with weights='float'"
        )
    write_arrays(place / WEIGHTS, arrays)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "config": {"class": type(config).__name__, "fields": config.to_json()},
        "parameters": [
            {"path": list(keys), "shape": list(a.shape), "dtype": str(a.dtype)}
            for keys, a in arrays.items()
        ],
        "files": stored_files(place / WEIGHTS),
    }
    (place / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def write_arrays(
    folder: Path, arrays: Mapping[Keys, np.ndarray | LazyArray], *, to_the_end: bool = False
) -> None:
    """Write arrays with orbax, one at a time.

    Of several processes of JAX, only the one that calls this takes part. Ctrl-C takes effect
    between two arrays: orbax cannot be stopped, and its threads would continue in the background.
    orbax runs in a thread without an event loop, unlike a notebook's.

    Args:
      to_the_end: whether Ctrl-C takes effect after the last array only.
    """
    with uninterrupted() as arrived, ThreadPoolExecutor(1, "checkpoint") as pool:
        signals: Sequence[int] = () if to_the_end else arrived
        pool.submit(_save, folder, arrays, signals).result()


def stored_files(folder: Path) -> dict[str, dict[str, int]]:
    """Return the sizes and checksums of the files in a folder, by name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "crc32": checksum(file),
        }
        for file in files
    }


def _save(
    folder: Path, arrays: Mapping[Keys, np.ndarray | LazyArray], arrived: Sequence[int]
) -> None:
    """Write arrays, and stop with InterruptedError once a signal has `arrived`."""
    import orbax.checkpoint as ocp

    alone = _this_process()
    # Compressing weights takes longer than writing them, and saves little.
    options: dict[str, Any] = {"multiprocessing_options": alone, "use_compression": False}
    tree = _nested({keys: _lazy(array) for keys, array in arrays.items()})
    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _handler()(arrived)))
    try:
        with _quiet():
            handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **options)
            with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
                writer.save(folder.resolve(), args=ocp.args.PyTreeSave(tree))
    except ValueError as error:  # from tensorstore, with the error code of the system
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _lazy(array: np.ndarray | LazyArray) -> LazyArray:
    if isinstance(array, LazyArray):
        return array
    return LazyArray(array.shape, array.dtype, lambda: array)


@functools.cache
def _handler() -> Any:
    """Return a class of orbax's handlers, which writes one array at a time.

    orbax itself copies all arrays first, and closes its event loop at the first error. Writes that
    go on would then fill the folder while it is removed, and each would show a traceback.
    """
    import orbax.checkpoint as ocp

    class StreamingHandler(ocp.type_handlers.NumpyHandler):
        def __init__(self, arrived: Sequence[int]):
            super().__init__(deepcopy_host_arrays=False)
            self._arrived = arrived  # signals
            self._ended = False  # by an error

        async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
            async with self._turn:
                if self._ended or self._arrived:
                    raise InterruptedError("the checkpoint is not written to its end")
                try:
                    await super()._open_and_write(value.make(), tspec, ts_context)
                except BaseException:
                    self._ended = True
                    raise

        async def _background_serialize(self, *arguments: Any, **options: Any) -> None:
            self._turn = asyncio.Semaphore(1)
            try:
                await super()._background_serialize(*arguments, **options)
            finally:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*others, return_exceptions=True)

    return StreamingHandler


def read_arrays(
    folder: Path, dtypes: Mapping[Keys, np.dtype | None], *, partial: bool = False
) -> Params:
    """Return arrays that orbax wrote as a tree; a dtype of None keeps the stored one.

    Args:
      dtypes: dtypes of the arrays by path, which are all of the folder unless `partial`.
    """
    import orbax.checkpoint as ocp

    arguments = _nested(
        {k: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype) for k, dtype in dtypes.items()}
    )
    wanted = _nested(dict.fromkeys(dtypes, 0)) if partial else None
    options = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=partial)
    with _reader() as reader:
        return reader.restore(folder.resolve(), args=options)


def read_leaves(folder: Path) -> dict[Keys, Leaf]:
    """Return the shapes and dtypes of arrays that orbax wrote, by path."""
    import jax

    with _reader() as reader:
        tree = reader.metadata(folder.resolve()).item_metadata.tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys): Leaf(
            tuple(leaf.shape), np.dtype(leaf.dtype)
        )
        for keys, leaf in leaves
        if hasattr(leaf, "shape")
    }


@contextlib.contextmanager
def _reader() -> Iterator[Any]:
    import orbax.checkpoint as ocp

    alone = _this_process()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with _quiet(), ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        yield reader


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence absl's log, to which orbax also logs errors that it raises."""
    log = logging.getLogger("absl")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _this_process() -> Any:
    """Return orbax's options for a call that no other process of JAX makes."""
    import jax
    import orbax.checkpoint as ocp

    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"host{own}"
    )


def _read_dtype(keys: Keys, leaf: Leaf, dtype: str | None) -> np.dtype:
    if dtype is None or leaf.dtype == DTYPES["int32"]:
        return leaf.dtype
    if dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    return FLOATS["float32" if keys[-1] in ALWAYS_FLOAT32 else dtype]


def _config(written: Mapping[str, Any]) -> AttentionConfig:
    return config_classes()[written["class"]].from_json(written["fields"])


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        for block in iter(functools.partial(file.read, BLOCK), b""):
            crc = zlib.crc32(block, crc)
    return crc


def _flat(params: Params, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, child in params.items():
        if isinstance(child, dict):
            yield from _flat(child, (*keys, key))
        else:
            yield (*keys, key), child


def _nested(leaves: Mapping[Keys, Any]) -> Params:
    root: Params = {}
    for keys, leaf in leaves.items():
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return root
