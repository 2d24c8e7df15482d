"""The default device and its free memory."""

import os
import re
import sys
from pathlib import Path

import jax

from dflash_jax.errors import PlanError

MEMORY = Path("/proc/meminfo")  # memory of a Linux host
GROUP = Path("/sys/fs/cgroup")  # limits of a Linux container


def default_device() -> jax.Device:
    """Return the device that arrays are put on.

    Raises:
      PlanError: JAX finds no device.
    """
    try:
        return jax.local_devices()[0]
    except (RuntimeError, AssertionError) as error:  # the latter for a platform not installed
        platforms = getattr(jax.config, "jax_platforms", None)
        asked = f"JAX_PLATFORMS={platforms!r} is not installed; unset it, or install it (for NVIDIA"
        asked += " GPUs the extra cuda13, for TPUs tpu)"
        raise PlanError(f"JAX found no device to run on: {str(error) or asked}") from error


def free_memory(device: jax.Device) -> int:
    """Return the free memory of a device in bytes.

    For a CPU, this is the free memory of the host, or of the container if that is less. On systems
    that do not report free memory, such as macOS, it is all memory of the host.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    text = MEMORY.read_text(encoding="utf-8") if MEMORY.is_file() else ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    if available:  # includes memory that caches files, such as weights
        return min(int(available[1]) * 1024, _free_in_container())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """Return the bytes left below the container's limit; sys.maxsize if there is none."""
    try:
        most, used, stat = (
            (GROUP / f"memory.{name}").read_text(encoding="utf-8")
            for name in ("max", "current", "stat")
        )
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        return max(int(most) - int(used) + int(cached), 0)
    except (OSError, ValueError, KeyError):  # no group, no limit ("max"), or groups of version 1
        return sys.maxsize
