"""Processes that were forked from one in which JAX runs: it cannot be used in them.

A fork has the memory of its parent and none of its threads. JAX computes in threads, so that a step
would wait for ever, for a device or for a lock that nobody holds any more.
"""

import os
import sys

from dflash_jax.errors import ForkedProcessError

_parent = 0  # number of the process in which JAX runs, if this one was forked from it


def check_not_forked() -> None:
    """Raise ForkedProcessError if this process cannot use JAX because its parent does."""
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
