"""What takes long is announced on standard error: on a terminal or in a notebook, not in logs."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

ENVIRONMENT = "DFLASH_PROGRESS"
PATIENCE = 2.0  # seconds that pass before anything is announced


def is_shown(chosen: bool | None = None) -> bool:
    """Whether to announce anything.

    Args:
      chosen: the answer, if not None. Else `DFLASH_PROGRESS` says "on" or "off"; where it is not
        set, the answer is whether standard error is a terminal or the output of a notebook.
    """
    if chosen is not None:
        return chosen
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if value:
        return value not in ("off", "0", "false", "no")
    stream = sys.stderr
    if stream is None or stream.closed:
        return False
    return stream.isatty() or type(stream).__module__.split(".")[0] == "ipykernel"


@contextlib.contextmanager
def announced(text: str, *, shown: bool, patience: float | None = None) -> Iterator[None]:
    """Print "text ..." once the block has taken a while, and how long it took when it ends.

    Args:
      shown: print at all; see `is_shown`.
      patience: seconds before the text is printed; two by default.
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
    """One line on standard error, begun by one thread and ended by another."""

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
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(text)
        sys.stderr.flush()
