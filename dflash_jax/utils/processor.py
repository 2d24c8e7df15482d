"""The processor of this machine, which determines how a CPU computes products."""

import functools
import re
from pathlib import Path


@functools.cache
def features() -> frozenset[str]:
    """Return the names of the processor's features, as Linux lists them; empty elsewhere."""
    flags = re.search(r"^flags\s*:(.*)$", _information(), re.MULTILINE)
    return frozenset(flags[1].split() if flags else ())


def widest_vectors() -> str:
    """Return the widest of "avx512f", "avx2" and "avx" that the processor has, or ""."""
    return next((flag for flag in ("avx512f", "avx2", "avx") if flag in features()), "")


@functools.cache
def processor() -> str:
    """Return model and features, which compiled code depends on; "" if they are unknown."""
    named = r"^(?:model name|flags|CPU part|Features)\s*:.*$"
    return "\n".join(sorted(set(re.findall(named, _information(), re.MULTILINE))))


def _information() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8") if info.is_file() else ""
