"""Number of concurrent calls of small programs."""

import os

import jax


def parallel_calls(most: int) -> int:
    """Return one call per core on a CPU, because a small program uses one core; otherwise one."""
    return min(cores(), most) if jax.default_backend() == "cpu" else 1


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
