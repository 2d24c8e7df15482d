"""Detect processes that were forked from one in which JAX runs. JAX cannot be used in them.

A fork has the memory of its parent and none of its threads. JAX computes in threads, so a step
would wait forever, for the device or for a lock that no thread holds.
"""

import os
import sys

from dflash_jax.errors import ForkedProcessError

parent = 0  # id of the process in which JAX runs, if this one was forked from it


def check_not_forked() -> None:
    """Raise ForkedProcessError if this process cannot use JAX because its parent does."""
    if parent:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from process {parent}, in which JAX runs, and"
            " cannot use it: threads are not copied, and it would wait for ever; start processes by"
            ' multiprocessing.get_context("spawn"), or load models after forking'
        )


def _after_fork() -> None:
    global parent
    bridge = sys.modules.get("jax._src.xla_bridge")
    runs = getattr(bridge, "backends_are_initialized", lambda: False)
    if not parent and runs():
        parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
