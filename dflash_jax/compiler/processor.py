"""How wide this machine's vectors are, which decides what products on a CPU are made of."""

import functools
import re
from pathlib import Path


@functools.cache
def widest_vectors() -> str:
    """The widest of "avx512f", "avx2" and "avx" that the processor has; "" where none is known."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    has = flags[1].split() if flags else []
    return next((flag for flag in ("avx512f", "avx2", "avx") if flag in has), "")
