"""Hosts of a training run: how they begin and end together, see `dflash_jax.distributed`.

Saved states are complete at any time, so that the same command resumes after any end.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_jax import distributed
from dflash_jax.distributed import STOPPED, Group, HostPlace
from dflash_jax.trainer.loop import TrainingStopped
from dflash_jax.utils.child_processes import on_this_machine

ADVICE = "run the same command to go on"


@contextlib.contextmanager
def joined(
    place: HostPlace, settings: Mapping[str, Any], command: Sequence[str] = ()
) -> Iterator[Group]:
    """Join the other hosts while the block runs. JAX must not have started.

    An error in the block ends this process and all other hosts.

    Args:
      settings: what all hosts must have in common.
      command: starts another host of this machine, given `--host` and `--coordinator`.

    Raises:
      HostError: this process cannot listen at the coordinator's address.
    """

    def words(host: int) -> Sequence[str]:
        where = ("--host", str(host), "--coordinator", place.coordinator)
        return ("dflash_jax", *command, *where)

    with contextlib.ExitStack() as entered:
        entered.enter_context(_without_output())
        if command:
            entered.enter_context(on_this_machine(words, place.size))
        group = distributed.join(place, settings, advice=ADVICE)
        try:
            yield group
        except TrainingStopped as stop:
            group.leave(f"{stop}; {ADVICE}", STOPPED)
        except BaseException as error:
            group.leave_by(error)
        group.close()


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Discard standard output, on which the CPU's collectives log their connections."""
    sys.stdout.flush()
    kept = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
