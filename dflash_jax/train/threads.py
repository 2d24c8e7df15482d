"""How many calls of small programs are worth making at a time."""

import os

import jax


def side_by_side(most: int) -> int:
    """One a core on a CPU, since a small program keeps one core busy; else one."""
    return min(cores(), most) if jax.default_backend() == "cpu" else 1


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
