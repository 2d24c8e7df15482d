"""Progress lines on standard error, in terminals and notebooks but not in logs."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

from dflash_jax.utils.switches import NO

ENVIRONMENT = "DFLASH_PROGRESS"
PATIENCE = 2.0  # seconds before a line is printed
EVERY = 0.2  # seconds between two changes of a line
_lines: "list[_Line]" = []  # of the blocks that run, the innermost last


def is_shown(chosen: bool | None = None) -> bool:
    """Return whether to print progress lines.

    Args:
      chosen: the answer, if not None. Otherwise `DFLASH_PROGRESS` decides ("on" or "off"); if it is
        not set, whether standard error is a terminal or the output of a notebook.
    """
    if chosen is not None:
        return chosen
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if value:
        return value not in NO
    stream = sys.stderr
    if stream is None or stream.closed:
        return False
    return stream.isatty() or type(stream).__module__.split(".")[0] == "ipykernel"


@contextlib.contextmanager
def announced(text: str, *, shown: bool, patience: float | None = None) -> Iterator[None]:
    """Print "text ..." if the block takes long, and its duration when it ends.

    Args:
      shown: whether to print; see `is_shown`.
      patience: seconds before the text is printed; `PATIENCE` by default.
    """
    if not shown:
        yield
        return
    patience = PATIENCE if patience is None else patience
    line = _Line(text)
    timer = threading.Timer(patience, line.begin)
    timer.daemon = True
    _lines.append(line)
    started = time.perf_counter()
    if patience:
        timer.start()
    else:
        line.begin()
    try:
        yield
    finally:
        timer.cancel()
        _lines.remove(line)
        line.end(time.perf_counter() - started)


class _Line:
    """One line on standard error, started by one thread and finished by another."""

    def __init__(self, text: str):
        self._text, self._detail = text, ""
        self._drawn = 0  # characters of the line with its detail; 0 if there was none
        self._lock = threading.Lock()
        self._begun = self._ended = False

    def begin(self) -> None:
        with self._lock:
            if not self._ended:
                self._begun = True
                _write(f"{self._text} ...")
                self._draw()

    def show(self, detail: str) -> None:
        with self._lock:
            self._detail = detail
            if self._begun and not self._ended:
                self._draw()

    def end(self, seconds: float) -> None:
        with self._lock:
            self._ended = True
            if self._drawn:
                _write(f"\r{' ' * self._drawn}\r{self._text} ...")
            if self._begun:
                _write(f" {seconds:.1f} s\n")

    def _draw(self) -> None:
        """Write the line again, where it fits: a wider one could not be overwritten."""
        width = shutil.get_terminal_size().columns - 1
        if self._detail and len(self._text) + 4 < width and sys.stderr.isatty():
            line = f"{self._text} ... {self._detail}"[:width]
            _write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)


def time_left(seconds: float) -> str:
    """Return a duration as "40 s left", "12 min left" or "3 h 20 min left"."""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min left" if minutes >= 90 else f"{minutes} min left"


class ShownCount:
    """Shows how much of some work is done, and how long the rest may take; thread-safe.

    It appears on the line of the innermost `announced` block, on terminals.

    Args:
      unit: "programs" gives "3/40 programs, 12 s left"; the share is shown without one.
    """

    def __init__(self, total: int, unit: str = ""):
        self._total, self._unit, self._done = max(total, 1), unit, 0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._next = 0.0

    def __call__(self, count: int = 1) -> None:
        """Count finished work."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if not _lines or now < self._next:
                return
            self._next = now + EVERY
            share = min(self._done / self._total, 1.0)
            text = f"{self._done}/{self._total} {self._unit}" if self._unit else f"{share:.0%}"
            if share:
                text += f", {time_left((now - self._started) * (1 - share) / share)}"
            with contextlib.suppress(IndexError):  # the last block has ended
                _lines[-1].show(text)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
        sys.stderr.write(text)
        sys.stderr.flush()
