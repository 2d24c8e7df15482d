"""Saved training states: the newest two of a run, written atomically by orbax.

All hosts of a run make the same calls; orbax writes each array once.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_utils

from dflash_jax.errors import CheckpointError
from dflash_jax.train import hosts
from dflash_jax.train.files import remove

State = TypeVar("State")
KEPT = 2  # the older one is the fallback if the newest is damaged
ARRAYS, ABOUT = "arrays", "about"


def save(folder: Path, step: int, state: State, identity: str) -> None:
    """Save the state after a step and remove all but the newest two.

    Raises:
      CheckpointError: the state could not be written; earlier ones stay.
      jax.errors.JaxRuntimeError: another host is gone.
    """
    items = ocp.args.Composite(
        arrays=ocp.args.PyTreeSave(_flat(state)),  # pyrefly: ignore
        about=ocp.args.JsonSave({"identity": identity}),  # pyrefly: ignore
    )
    try:
        with _manager(folder) as manager:
            manager.save(step, args=items)
    except Exception as error:  # orbax and tensorstore raise many kinds
        group = hosts.current()
        if group.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # the hosts could not agree; the disk has no part in it
        if group.first:
            for part in folder.glob("*.orbax-checkpoint-tmp*"):
                remove(part)
        raise full(folder, error) from error


def newest(folder: Path, state: State, identity: str) -> tuple[int, State]:
    """Return step and state of the newest saved state, with the placement of `state`.

    Returns 0 and `state` if nothing is saved.

    Raises:
      CheckpointError: the saved state belongs to another run, or cannot be read.
      HostError: hosts see different states.
    """
    exists, group = folder.is_dir(), hosts.current()
    group.agree("the presence of saved states", exists)
    if not exists:
        return 0, state
    flat, structure = _flat(state), jax.tree.structure(state)
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in flat.items()
    }
    with _manager(folder) as manager:
        step = manager.latest_step()
        group.agree("the newest saved step", step)
        if step is None:
            return 0, state
        about = ocp.args.Composite(about=ocp.args.JsonRestore())  # pyrefly: ignore
        wanted = checkpoint_utils.construct_restore_args(shapes)
        arrays = ocp.args.PyTreeRestore(item=shapes, restore_args=wanted)  # pyrefly: ignore
        try:
            if manager.restore(step, args=about)[ABOUT]["identity"] != identity:
                raise CheckpointError(
                    f"{folder} was saved by another preset or seed; remove it, or train into"
                    " another folder"
                )
            restored = manager.restore(step, args=ocp.args.Composite(arrays=arrays))[ARRAYS]
        except CheckpointError:
            raise
        except Exception as error:  # orbax and tensorstore raise many kinds
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{folder / str(step)} cannot be read ({reason}); remove it, and the same command"
                " goes on from the state saved before it"
            ) from error
    return step, jax.tree.unflatten(structure, [restored[name] for name in flat])


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


@contextlib.contextmanager
def _manager(folder: Path) -> Iterator[ocp.CheckpointManager]:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT,
        create=True,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
    )
    manager = ocp.CheckpointManager(folder.resolve(), options=options)
    try:
        yield manager
    finally:
        manager.close()
