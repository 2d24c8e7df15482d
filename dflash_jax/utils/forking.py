"""Detection of processes that were forked while JAX was running.

A forked process has the memory of its parent but none of its threads. JAX computes in threads, so
a step in a forked process would wait forever.
"""

import os
import sys

from dflash_jax.errors import ForkedProcessError

_parent = 0  # process id of the parent, if this process was forked while JAX was running


def check_not_forked() -> None:
    """Raise ForkedProcessError if this process was forked while JAX was running."""
    if _parent:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from process {_parent}, in which JAX runs, and"
            " cannot use it: threads are not copied, and it would wait for ever; start processes by"
            ' multiprocessing.get_context("spawn"), or load models after forking'
        )


def _after_fork() -> None:
    global _parent
    bridge = sys.modules.get("jax._src.xla_bridge")
    runs = getattr(bridge, "backends_are_initialized", lambda: False)
    if not _parent and runs():
        _parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
