"""Programs kept on disk. A process of its own: a run of tests has its cache already."""

import os
import subprocess
import sys
from pathlib import Path

CASE = """
import logging, os, sys, time
from pathlib import Path
import jax
from dflash_jax.compiler import enable_compilation_cache

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
enable_compilation_cache(folder)

def compiled():
    jax.clear_caches()
    jax.jit(lambda x: x + 1).lower(1.0).compile()

def damage(age):
    entry.write_bytes(whole[: len(whole) // 2])
    os.utime(entry, (time.time() - age, time.time() - age))

compiled()
[entry] = folder.glob("*-cache")
whole = entry.read_bytes()
damage(age=0)  # as if another process were writing it
compiled()
assert len(entry.read_bytes()) < len(whole)
damage(age=1000)
compiled()
assert len(entry.read_bytes()) > len(whole) / 2
compiled()
"""


def test_a_half_written_program_is_removed_and_written_anew(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command = [sys.executable, "-c", CASE, str(tmp_path / "xla")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was damaged, and is compiled anew") == 1
    assert "Warning" not in done.stderr
    assert (tmp_path / "xla").stat().st_mode & 0o777 == 0o700
