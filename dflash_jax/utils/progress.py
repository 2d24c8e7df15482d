"""Progress lines on standard error, in terminals and notebooks but not in logs."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

# Values of environment variables.
YES = ("on", "1", "true", "yes")
NO = ("off", "0", "false", "no")
ENVIRONMENT = "DFLASH_PROGRESS"
PATIENCE = 2.0  # seconds before a line is printed
EVERY = 0.2  # seconds between two counts that are shown
TICK = 1.0  # seconds between two times that are shown
GUESS = 1.0  # seconds of work from which the rest can be estimated
_lines: "list[_Line]" = []  # lines of the blocks that run, the innermost last
_lock = threading.Lock()  # held while a line is written


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

    On terminals the line shows the seconds so far.

    Args:
      shown: whether to print; see `is_shown`.
      patience: seconds before the text is printed; `PATIENCE` by default.
    """
    if not shown:
        yield
        return
    line = _Line(text)
    _lines.append(line)
    line.start(PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        _lines.remove(line)
        line.end()


class _Line:
    """One line on standard error, started by one thread and finished by another."""

    current: "_Line | None" = None  # the line that the cursor is in

    def __init__(self, text: str):
        self._text = f"{text} ..."
        self._detail = ""
        self._end: float | None = None  # estimated end of the work
        self._drawn = 0  # characters of the line with its details; 0 if there were none
        self._begun = False
        self._started = time.perf_counter()
        self._ended = threading.Event()

    def start(self, patience: float) -> None:
        """Begin the line after `patience` seconds, then show the time that passes."""
        if not patience:
            self._begin()
        threading.Thread(target=self._tick, args=(patience,), daemon=True).start()

    def show(self, detail: str, end: float | None) -> None:
        with _lock:
            self._detail = detail
            self._end = end
            self._draw()

    def end(self) -> None:
        seconds = time.perf_counter() - self._started
        with _lock:
            self._ended.set()
            if not self._begun:
                return
            if self._drawn:
                _write(f"\r{' ' * self._drawn}\r{self._text}")
            elif _Line.current is not self:
                self._enter()
            _write(f" {seconds:.1f} s\n")
            _Line.current = None

    def _tick(self, patience: float) -> None:
        if patience and not self._ended.wait(patience):
            self._begin()
        while not self._ended.wait(TICK):
            with _lock:
                self._draw()

    def _begin(self) -> None:
        with _lock:
            if not self._ended.is_set():
                self._begun = True
                self._enter()
                self._draw()

    def _enter(self) -> None:
        """Write the text in a new line: that of an outer block stays as it is."""
        if _Line.current is not None:
            _Line.current._drawn = 0
            _write("\n")
        _Line.current = self
        _write(self._fitted(""))

    def _fitted(self, details: str) -> str:
        """Return the line, which a terminal can overwrite if it is no wider than that.

        The text is shortened where the details would not fit, since they are what changes.
        """
        room = max(shutil.get_terminal_size().columns - 1, 1)
        line = f"{self._text} {details}".rstrip()
        if len(line) <= room or not sys.stderr.isatty():
            return line
        kept = max(room - len(f"... {details}".rstrip()), 0)
        return f"{self._text[:kept]}... {details}".rstrip()[:room]

    def _draw(self) -> None:
        """Write the line again, with what is known by now."""
        if not self._begun or self._ended.is_set() or _Line.current not in (None, self):
            return
        now = time.perf_counter()
        seconds = int(now - self._started)
        left = "" if self._end is None else time_left(max(self._end - now, 0))
        passed = f"{seconds} s" if seconds > 0 else ""
        details = ", ".join(filter(None, (passed, self._detail, left)))
        if details and sys.stderr.isatty():
            line = self._fitted(details)
            _write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)
            _Line.current = self


def time_left(seconds: float) -> str:
    """Return a duration as "40 s left", "12 min left" or "3 h 20 min left"."""
    return f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Return a duration as "40 s", "12 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 90 else f"{minutes} min"


class ShownCount:
    """Shows how much of some work is done, and how long the rest may take; thread-safe.

    It appears on the line of the innermost `announced` block, on terminals.

    Args:
      unit: "programs" gives "3/40 programs, 12 s left"; the share is shown without one.
    """

    def __init__(self, total: int, unit: str = ""):
        self._total = max(total, 1)
        self._unit = unit
        self._done = 0
        self._lock = threading.Lock()
        self._started = time.perf_counter()
        self._next = 0.0

    def __call__(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            now = time.perf_counter()
            if not _lines or now < self._next:
                return
            self._next = now + EVERY
            share = min(self._done / self._total, 1.0)
            text = f"{self._done}/{self._total} {self._unit}" if self._unit else f"{share:.0%}"
            passed = now - self._started
            end = self._started + passed / share if share and passed >= GUESS else None
            with contextlib.suppress(IndexError):  # the last block has ended
                _lines[-1].show(text, end)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
        sys.stderr.write(text)
        sys.stderr.flush()
