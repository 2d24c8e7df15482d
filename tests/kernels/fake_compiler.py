"""Scripts that stand in for a C++ compiler, to test what surrounds one."""

import stat
from pathlib import Path

VERSION_ONLY = 'test "$1" = --version && { echo version 1; exit 0; }\n'
# Writes the output that it is asked for, and a line to a file for each.
WRITES = """test "$1" = --version && { echo version 1; exit 0; }
while test "$1" != -o; do shift; done
echo "$2" >> "$0.log"
echo made > "$2"
"""


def compiler(path: Path, text: str = WRITES) -> str:
    """Write a script; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def outputs(path: Path) -> list[str]:
    """Return the names of the files that the script of `WRITES` wrote, in order."""
    log = Path(f"{path}.log")
    return [Path(line).name for line in log.read_text().splitlines()] if log.exists() else []
