"""What the commands about weight files share: their options, reports and progress."""

import argparse
import importlib.resources
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.converters.taps import AUTO, CHOICES
from dflash_jax.utils.progress import time_left
from dflash_jax.utils.sources import SMOLLM2, find_smollm2

# Shipped models by name, as folders below dflash_jax/data.
SHIPPED = {
    "tiny": "tiny/target",
    "tiny/target": "tiny/target",
    "tiny/drafter": "tiny/drafter",
}
NAMED = "'tiny' is the shipped target, 'tiny/drafter' its drafter; 'smollm2' is SmolLM2-135M"
SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([KMGT]?I?)B?", re.IGNORECASE)
UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
    "I": 0,
}


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command that prints a report, and return its parser."""
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


def layer_ids_option(command: argparse.ArgumentParser) -> None:
    """Add the option of commands that read drafters."""
    command.add_argument(
        "--layer-ids",
        choices=CHOICES,
        default=AUTO,
        help="how a drafter file numbers target layers: as its layout defines (auto), from 0"
        " (zero-based), or from 1 (one-based)",
    )


def path_of(text: str) -> Path:
    """Return a path with ~ expanded, which some shells do not do in --option=~/x."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def model_path(text: str) -> Path:
    """Return a model's path: an existing one, else that of the model of that name."""
    path = path_of(text)
    if text == SMOLLM2 and not path.exists():
        return find_smollm2()
    if text in SHIPPED and not path.exists():
        return Path(str(importlib.resources.files("dflash_jax"))) / "data" / SHIPPED[text]
    return path


def count_of(text: str) -> int:
    """Return a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number from 0")
    return int(text)


def size_of(text: str) -> int:
    """Return a size in bytes, as 5GB or 500M (powers of 1000) or 2GiB (of 1024)."""
    match = SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a size such as 5GB, 500M or 2GiB")
    return size


def print_report(options: argparse.Namespace, report: dict[str, Any], lines: list[str]) -> None:
    """Print a report as lines, or as JSON if that was asked for."""
    print(json.dumps(_plain(report), indent=1) if options.json else "\n".join(lines))


def _plain(value: Any) -> Any:
    """Replace non-finite numbers, which damaged files hold and JSON lacks, by text."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class ProgressBar:
    """The share of a model's weights that is done, shown on standard error if it is a terminal."""

    def __init__(self, tensors: TensorSource):
        shapes = (tensors.shape(name) for name in tensors.names())
        self._total = max(1, sum(math.prod(shape) for shape in shapes))
        self._done = 0
        self._started = time.monotonic()
        self._shown = 0.0
        self._lock = threading.Lock()
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, name: str, weights: int) -> None:
        with self._lock:
            self._done += weights
            now = time.monotonic()
            if self._live and now - self._shown > 0.1:
                self._shown = now
                share = min(1.0, self._done / self._total)
                bar = "#" * int(30 * share)
                left = time_left((now - self._started) * (1 - share) / max(share, 1e-9))
                self._show(f"[{bar:30}] {share:4.0%} {left}  {name[:40]}")

    def __exit__(self, *exception: object) -> None:
        if self._live and self._shown:
            self._show("")
            print(end="\r", file=sys.stderr)

    def _show(self, line: str) -> None:
        """Fill at most one terminal line, because a longer one could not be overwritten."""
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        width = min(width, 78) if width > 0 else 78
        print(f"\r{line[:width]:{width}}", end="", file=sys.stderr)
