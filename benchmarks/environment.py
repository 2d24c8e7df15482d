"""Where a figure was measured: written beside every result."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "dflash-jax", "torch", "transformers", "dflash")


def environment() -> dict[str, Any]:
    """Versions, device and processor of this process."""
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
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
