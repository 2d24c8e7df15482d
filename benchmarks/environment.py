"""Description of the machine and the versions, stored with every result."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from dflash_jax.utils.processor import widest_vectors

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "dflash-jax", "torch", "transformers", "dflash")


def environment() -> dict[str, Any]:
    """Return versions, device and processor of this process."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.local_devices()[0]
    return {
        "python": platform.python_version(),
        "versions": versions,
        "device": f"{device.platform} {device.device_kind}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """Return the processor's name and the width of its vectors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    said = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    return " ".join([said.get("model name", platform.processor()), widest_vectors()]).strip()
