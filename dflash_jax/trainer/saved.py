"""Saved training states: the newest two of a run, each complete or absent.

    STATE/STEP/about.json   what the state belongs to, sizes and checksums of the other files, and a
                            checksum of all that
    STATE/STEP/arrays/      the arrays, written by orbax

All hosts of a run make the same calls and have the same state. Host 0 writes it; all read it.
"""

import json
import zlib
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from dflash_jax import checkpoint, distributed
from dflash_jax.errors import CheckpointError
from dflash_jax.trainer.files import DAMAGED, remove, write_json
from dflash_jax.utils import atomic
from dflash_jax.utils.atomic import new_path

State = TypeVar("State")
KEPT = 2  # the older one is the fallback if the newest is damaged
ARRAYS = "arrays"
ABOUT = "about.json"


def save(folder: Path, step: int, state: State, identity: str) -> None:
    """Save the state after a step and remove all but the newest two.

    A signal that arrives meanwhile takes effect when the state is saved.

    Raises:
      CheckpointError: the state could not be written; earlier ones stay.
    """
    group = distributed.current()
    if group.first:
        try:
            _write(folder, step, state, identity)
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise full(folder, error) from error
    group.exchange("saved")


def _write(folder: Path, step: int, state: Any, identity: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _clear_fragments(folder)
    arrays: dict[checkpoint.Keys, np.ndarray] = {
        (name,): np.asarray(leaf) for name, leaf in _flat(state).items()
    }
    size = sum(array.nbytes for array in arrays.values())
    with new_path(folder / str(step), overwrite=False, needed=size) as place:
        place.mkdir()
        checkpoint.write_arrays(place / ARRAYS, arrays, to_the_end=True)
        files = checkpoint.stored_files(place / ARRAYS)
        write_json(place / ABOUT, {"crc32": _sum(identity, files), "state": [identity, files]})
    for old in _steps(folder)[:-KEPT]:
        remove(folder / str(old))


def _clear_fragments(folder: Path) -> None:
    """Remove what processes left that were killed while they saved."""
    for path in folder.glob(".*.partial-*"):
        atomic.clear(folder / path.name[1:].partition(".")[0])


def newest(folder: Path, state: State, identity: str) -> tuple[int, State]:
    """Return step and state of the newest saved state, with the placement of `state`.

    Returns 0 and `state` if nothing is saved.

    Raises:
      CheckpointError: the saved state belongs to another run, or cannot be read.
      HostError: hosts see different states.
    """
    if distributed.current().first:
        _clear_fragments(folder)  # no save follows where the last step is saved already
    step = next(reversed(_steps(folder)), 0)
    distributed.current().agree("the newest saved step", step)
    if not step:
        return 0, state
    flat = _flat(state)
    structure = jax.tree.structure(state)
    try:
        about = json.loads((folder / str(step) / ABOUT).read_text(encoding="utf-8"))
        recorded, files = about["state"]
        if _sum(recorded, files) != about["crc32"]:
            raise ValueError(f"the checksum of {ABOUT} is wrong")
        if recorded != identity:
            raise CheckpointError(
                f"{folder} was saved by another preset or seed; remove it, or train into another"
                " folder"
            )
        _check(folder / str(step) / ARRAYS, files)
    except (RecursionError, *DAMAGED) as error:
        raise _unreadable(folder, step, error) from error
    try:
        arrays = checkpoint.read_arrays(
            folder / str(step) / ARRAYS, {(name,): None for name in flat}
        )
        restored = [_placed(arrays[name], like) for name, like in flat.items()]
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise _unreadable(folder, step, error) from error
    return step, jax.tree.unflatten(structure, restored)


def _sum(identity: str, files: dict[str, dict[str, int]]) -> int:
    return zlib.crc32(json.dumps([identity, files], sort_keys=True).encode())


def _check(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Raise ValueError unless a folder holds exactly these files, as they were written."""
    present = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if not p.is_dir()}
    if changed := sorted(present.keys() ^ files.keys()):
        raise ValueError(f"{changed[0]} is {'missing' if changed[0] in files else 'not of it'}")
    for name, path in present.items():
        size = path.stat().st_size
        if not path.is_file() or path.is_symlink() or size != files[name]["bytes"]:
            raise ValueError(f"{name} has {size} bytes; expected {files[name]['bytes']}")
        if checkpoint.checksum(path) != files[name]["crc32"]:
            raise ValueError(f"the checksum of {name} is wrong")


def _placed(array: np.ndarray, like: jax.Array) -> jax.Array:
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"an array is {array.dtype} {list(array.shape)}; expected {like.dtype}"
            f" {list(like.shape)}"
        )
    return jax.make_array_from_process_local_data(like.sharding, array)


def _steps(folder: Path) -> list[int]:
    """Return the steps with a saved state, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _unreadable(folder: Path, step: int, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return CheckpointError(
        f"{folder / str(step)} cannot be read ({reason}); remove it, and the same command goes on"
        " from the state saved before it"
    )


def full(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that could not be written."""
    reason = str(error).partition("\n")[0][:200]
    return CheckpointError(
        f"{path} could not be written ({reason}); earlier states are intact: free some space"
        " and run the same command to resume"
    )


def _flat(state: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
