"""The device an engine runs on, and the memory it may take there."""

import os
import re
import sys
from pathlib import Path

import jax

from dflash_jax.errors import PlanError

MEMORY = Path("/proc/meminfo")  # of the host, on Linux
GROUP = Path("/sys/fs/cgroup")  # of the container, there


def default_device() -> jax.Device:
    """The device that everything is put on; PlanError where JAX finds none that it may use."""
    try:
        return jax.local_devices()[0]
    except RuntimeError as error:
        raise PlanError(f"JAX found no device to run on: {error}") from error


def free_memory(device: jax.Device) -> int:
    """Bytes an engine may take: free memory of the device, or of the host for a CPU, and of the
    container that it may be in.

    All of the host's where the system does not say how much is free, as on macOS.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    said = MEMORY.read_text(encoding="utf-8") if MEMORY.is_file() else ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", said, re.MULTILINE)
    if found:  # with memory that only caches files, such as weights read before
        return min(int(found[1]) * 1024, _free_in_container())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """Bytes left below the limit of a container; no bound where there is none."""
    try:
        most, used, stat = (
            (GROUP / f"memory.{name}").read_text(encoding="utf-8")
            for name in ("max", "current", "stat")
        )
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        return max(int(most) - int(used) + int(cached), 0)
    except (OSError, ValueError, KeyError):  # no group, no limit ("max"), or groups of version 1
        return sys.maxsize
