"""Result files: figures, with a description of the machine and the versions."""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dflash_jax.utils.processor import widest_vectors

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "numpy",
    "dflash-jax",
    "torch",
    "transformers",
    "dflash",
)


def write_result(path: Path | None, suite: str, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, with the environment; nothing if there is no path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"suite": suite, "environment": environment()} | dict(figures)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
