"""The programs that damage folders and kill training find no fault."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mutations", "kills"])
def test_nothing_damaged_or_half_written_is_used(name: str) -> None:
    command = [sys.executable, "-m", f"tests.soak.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
