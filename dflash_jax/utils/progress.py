"""Progress lines on standard error, in terminals and notebooks but not in logs."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from dflash_jax.utils.switches import NO

ENVIRONMENT = "DFLASH_PROGRESS"
PATIENCE = 2.0  # seconds before a line is printed


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
    started = time.perf_counter()
    if patience:
        timer.start()
    else:
        line.begin()
    try:
        yield
    finally:
        timer.cancel()
        line.end(time.perf_counter() - started)


class _Line:
    """One line on standard error, started by one thread and finished by another."""

    def __init__(self, text: str):
        self._text = text
        self._lock = threading.Lock()
        self._begun = self._ended = False

    def begin(self) -> None:
        with self._lock:
            if not self._ended:
                self._begun = True
                _write(f"{self._text} ...")

    def end(self, seconds: float) -> None:
        with self._lock:
            self._ended = True
            if self._begun:
                _write(f" {seconds:.1f} s\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
        sys.stderr.write(text)
        sys.stderr.flush()
