"""Our own checkpoints, and output that appears whole or not at all.

    NAME/checkpoint.json   what the model is; shapes, dtypes, file sizes and checksums
    NAME/weights/          the parameter tree, written by orbax
    NAME/tokenizer.json    and other files that belong to the model

A parameter tree is nested dicts of NumPy or JAX arrays. Orbax (and with it jax) is imported only
when weights are written or read.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.command import uninterrupted
from dflash_jax.config import ALWAYS_FLOAT32, AttentionConfig
from dflash_jax.errors import CheckpointError, ConfigError

Params = dict[str, Any]
Keys = tuple[str, ...]  # the way to a leaf

MANIFEST, WEIGHTS = "checkpoint.json", "weights"
MODEL_FILES = (MANIFEST, "config.json")  # what a folder with a model holds one of
FORMAT, VERSION = "dflash_jax checkpoint", 1
CONFIGS = {  # class of a configuration: its file in dflash_jax/config
    "DFlash2Config": "dflash2",
    "DSparkConfig": "dspark",
    "DrafterConfig": "dflash",
    "Gemma4Config": "gemma4",
    "GptOssConfig": "gpt_oss",
    "HybridConfig": "qwen3_5",
    "Qwen3MoeConfig": "qwen3_moe",
    "TargetConfig": "base",
}
FLOATS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
DTYPES = FLOATS | {"int32": np.dtype(np.int32)}
BLOCK = 1 << 24  # bytes read at a time for a checksum


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A stored parameter."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read and whose files have the sizes it says."""

    path: Path
    config: AttentionConfig
    leaves: Mapping[Keys, Leaf]
    checksums: Mapping[str, int]  # of the files below `weights`

    def load(self, dtype: str | None = None) -> Params:
        """The parameter tree as NumPy arrays; floating-point ones cast to `dtype` if given.

        What `ALWAYS_FLOAT32` names is float32 then.

        Raises:
          CheckpointError: a file is not the one that was written, or does not hold its leaves.
        """
        self._verify()
        wanted = {keys: _read_dtype(keys, leaf, dtype) for keys, leaf in self.leaves.items()}
        try:
            params = read_arrays(self.path / WEIGHTS, wanted)
        except Exception as error:  # orbax and tensorstore raise many kinds
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self.path / WEIGHTS} cannot be read ({reason}); convert the model again"
            ) from error
        found = dict(_flat(params))
        for keys, leaf in self.leaves.items():
            if found[keys].shape != leaf.shape or found[keys].dtype != wanted[keys]:
                raise CheckpointError(
                    f"{self.path}: {'/'.join(keys)} is {found[keys].dtype}"
                    f" {list(found[keys].shape)}, its manifest says {list(leaf.shape)}; convert"
                    " the model again"
                )
        return params

    def _verify(self) -> None:
        files = list(self.checksums)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            sums = pool.map(checksum, [self.path / WEIGHTS / name for name in files])
            for name, found in zip(files, sums, strict=True):
                if found != self.checksums[name]:
                    raise CheckpointError(
                        f"{self.path / WEIGHTS / name} is damaged (its checksum is wrong); copy"
                        " the checkpoint again or convert the model again"
                    )


def is_checkpoint(path: Path) -> bool:
    """Whether a folder claims to be one of our checkpoints."""
    return (path / MANIFEST).is_file()


def save(
    path: Path,
    config: AttentionConfig,
    params: Params,
    *,
    companions: Mapping[str, str | Path] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint at `path`, whole or not at all.

    Args:
      params: the parameter tree of `config`, an engine's included whatever its plan's `order`.
      companions: files to keep beside the weights by name, as texts or as paths to copy.

    Raises:
      CheckpointError: `path` exists and may not be overwritten, parameters are packed, or the disk
        is full.
    """
    arrays = {keys: np.asarray(leaf) for keys, leaf in _flat(params)}
    needed = sum(array.nbytes for array in arrays.values())
    with new_path(path, overwrite=overwrite, needed=needed) as place:
        write(place, config, _nested(arrays), companions or {})


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, its weights unread.

    Raises:
      CheckpointError: it is none of ours, of a later version, incomplete or contradictory.
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
    said = manifest.get("format") if isinstance(manifest, dict) else None
    if said != FORMAT or type(manifest.get("version")) is not int:
        raise CheckpointError(f"{path} says format {said!r}; expected {FORMAT!r}: not one of ours")
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
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise CheckpointError(
                f"{file} is {state}, expected {size} bytes; copy the checkpoint again"
            )


def write(
    place: Path, config: AttentionConfig, params: Params, companions: Mapping[str, str | Path]
) -> None:
    """Makes the folder; weights first, the manifest last: one cut short is no checkpoint."""
    place.mkdir()
    copy_companions(companions, place)
    arrays = {keys: np.asarray(leaf) for keys, leaf in _flat(params)}
    unknown = sorted({str(a.dtype) for a in arrays.values()} - set(DTYPES))
    if unknown:
        raise CheckpointError(
            f"parameters of {', '.join(unknown)}; expected {', '.join(DTYPES)}: packed ones cannot"
            " be saved, load the model with weights='float'"
        )
    files = write_arrays(place / WEIGHTS, arrays)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "config": {"class": type(config).__name__, "fields": config.to_json()},
        "parameters": [
            {"path": list(keys), "shape": list(a.shape), "dtype": str(a.dtype)}
            for keys, a in arrays.items()
        ],
        "files": files,
    }
    (place / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def write_arrays(folder: Path, arrays: Mapping[Keys, np.ndarray]) -> dict[str, dict[str, int]]:
    """Writes arrays by orbax; the sizes and checksums of the files it made, by name.

    Ctrl-C takes effect when all is written: orbax cannot be stopped, and its threads would go on
    behind the caller's back.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        saving = pool.submit(_save, folder, arrays)
        try:
            saving.result()
        except BaseException:
            with uninterrupted():
                wait([saving])
            raise
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "crc32": checksum(file),
        }
        for file in files
    }


def _save(folder: Path, arrays: Mapping[Keys, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    # Weights hardly compress, and trying takes longer than writing them.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    log = logging.getLogger("absl")  # where orbax traces back what it raises anyway
    before, log.disabled = log.disabled, True
    try:
        with ocp.Checkpointer(handler) as writer:
            writer.save(folder.resolve(), args=ocp.args.PyTreeSave(_nested(arrays)))
    except ValueError as error:  # of tensorstore, with the system's code inside
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    finally:
        log.disabled = before


def read_arrays(folder: Path, dtypes: Mapping[Keys, np.dtype | None]) -> Params:
    """Arrays that `write_arrays` wrote, as a tree; None keeps the dtype they were written in."""
    import orbax.checkpoint as ocp

    arguments = _nested(
        {k: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype) for k, dtype in dtypes.items()}
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder.resolve(), args=ocp.args.PyTreeRestore(restore_args=arguments))


def _read_dtype(keys: Keys, leaf: Leaf, dtype: str | None) -> np.dtype:
    if dtype is None or leaf.dtype == DTYPES["int32"]:
        return leaf.dtype
    if dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    return FLOATS["float32" if keys[-1] in ALWAYS_FLOAT32 else dtype]


def _config(written: Mapping[str, Any]) -> AttentionConfig:
    name = written["class"]
    module = importlib.import_module(f"dflash_jax.config.{CONFIGS[name]}")
    return getattr(module, name).from_json(written["fields"])


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        for block in iter(functools.partial(file.read, BLOCK), b""):
            found = zlib.crc32(block, found)
    return found


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


def copy_companions(companions: Mapping[str, str | Path], place: Path) -> None:
    """Puts files into a folder: paths are copied, texts written."""
    for name, content in companions.items():
        if isinstance(content, Path):
            shutil.copyfile(content, place / name)
        else:
            (place / name).write_text(content, encoding="utf-8")


@contextlib.contextmanager
def new_path(path: Path, *, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yields a temporary path to write a file or folder at; it becomes `path` at the end.

    A link is followed. Nothing is left behind on failure, and several may write at a time.

    Raises:
      CheckpointError: `path` exists and may not be overwritten, also if it is a folder that another
        writer made meanwhile, or one that holds anything but a model; it names nothing; fewer than
        `needed` bytes are free, or the disk fills up.
    """
    try:
        place = _place(path, overwrite)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise _explained(error, path) from error
    parent = place.parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is not a folder; create it first")
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{path} needs {needed / 1e6:,.1f} MB and {parent} has {free / 1e6:,.1f} MB free;"
            " free some space or choose another place"
        )
    own = f"{os.getpid()}-{secrets.token_hex(4)}"
    stem = place.name[:40]  # a name may be as long as names may be
    temporary, old = (parent / f".{stem}.{kind}-{own}" for kind in ("partial", "old"))
    try:
        yield temporary
        with uninterrupted():
            _swap(temporary, place, old if overwrite else None)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        with uninterrupted():
            _remove(temporary)


def _place(path: Path, overwrite: bool) -> Path:
    """Where a path leads; refused if nothing can, or should, be put there."""
    if path.name in ("", ".."):
        raise CheckpointError(f"'{path}' does not name what is to be written; give it a name")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists; choose another place or give --overwrite")
    place = Path(os.path.realpath(path))
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise CheckpointError(f"{path} is neither a file nor a folder; choose another place")
    if os.path.ismount(place):
        raise CheckpointError(f"{path} is where a disk is mounted; choose a place below it")
    known = any((place / name).is_file() for name in MODEL_FILES)
    if place.is_dir() and not known and any(place.iterdir()):
        raise CheckpointError(
            f"{path} holds files but no {' or '.join(MODEL_FILES)}, so it is no model and is not"
            " overwritten; remove it yourself or choose another place"
        )
    return place


def _swap(temporary: Path, path: Path, old: Path | None) -> None:
    """Puts the one in place of the other, which lies at `old` meanwhile; None replaces none."""
    if old is None or not os.path.lexists(path):
        temporary.rename(path)
        return
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _explained(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"the disk is full; nothing was left at {path}: free some space")
    return CheckpointError(f"{path} cannot be written ({error.strerror}); check the place")
