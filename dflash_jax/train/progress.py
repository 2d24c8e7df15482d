"""Progress lines of a stage, with an estimate of the time left."""

import threading
import time
from collections.abc import Callable

from dflash_jax.utils.progress import time_left

EVERY = 10.0  # seconds between two lines


class StageProgress:
    """Counts the items of a stage and reports the count every few seconds; thread-safe.

    Args:
      label, unit: "answers", "groups" gives lines such as "answers 3/40 groups, 12 min left".
      done: items finished by an earlier call, which say nothing about the speed of this one.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        report: Callable[[str], None],
        *,
        done: int = 0,
        every: float = EVERY,
    ):
        self._label, self._total, self._unit, self._report = label, total, unit, report
        self._first = self._done = done
        self._started, self._every, self._lock = time.monotonic(), every, threading.Lock()
        self._next = self._started + every

    def __call__(self, count: int = 1) -> None:
        """Count finished items."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now < self._next and self._done < self._total:
                return
            self._next = now + self._every
            line = f"{self._label} {self._done}/{self._total} {self._unit}"
            if self._done < self._total:
                pace = (now - self._started) / max(self._done - self._first, 1)
                line += f", {time_left(pace * (self._total - self._done))}"
            self._report(line)
