"""Groups of work: results saved in order, one JSON line per group, and lines of progress."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash_jax.trainer.files import sound
from dflash_jax.trainer.loop import TrainingStopped, append_lines, stop_flag
from dflash_jax.utils.progress import time_left

Compute = Callable[[range], Generator[list[Any]]]  # yields the results of groups, in order


def in_threads(work: Callable[[int], list[Any]], workers: int) -> Compute:
    """Return a function that computes groups by their numbers, in threads."""

    def compute(numbers: range) -> Generator[list[Any]]:
        pool = ThreadPoolExecutor(workers)
        try:
            submitted = [pool.submit(work, i) for i in numbers]
            for group in submitted:
                yield group.result()
        finally:
            pool.shutdown(cancel_futures=True)

    return compute


def results(
    path: Path,
    sizes: Sequence[int],
    compute: Compute,
    *,
    label: str,
    progress: Callable[[], None] = lambda: None,
) -> Generator[list[Any]]:
    """Yield the result of each group: those stored in `path`, then new ones, saved first.

    Args:
      sizes: number of items of each group's result.
      compute: yields the results of the groups that are not stored.
      label: the stage, for messages.
      progress: called after each new group.

    Raises:
      CheckpointError: `path` is damaged, or the disk is full.
      TrainingStopped: a signal arrived; finished groups are saved and the same call resumes.
    """
    done = stored(path, sizes)
    yield from done
    if len(done) == len(sizes):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with stop_flag() as flag, contextlib.closing(compute(range(len(done), len(sizes)))) as new:
        for number, items in enumerate(new, len(done) + 1):
            append_lines(path, [json.dumps(items)])
            progress()
            if flag.raised:
                raise TrainingStopped(
                    f"{label} stopped at group {number} of {len(sizes)}; state saved"
                )
            yield items


def stored(path: Path, sizes: Sequence[int]) -> list[list[Any]]:
    """Return the groups saved so far, without an incomplete last line.

    Args:
      sizes: sizes of all groups.

    Raises:
      CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return []
    with sound(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        groups = [json.loads(line) for line in whole.splitlines()]
        if [*map(len, groups)] != list(sizes[: len(groups)]):
            raise ValueError("its groups have other sizes")
    return groups


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
        self._label = label
        self._total = total
        self._unit = unit
        self._report = report
        self._first = done
        self._done = done
        self._started = time.monotonic()
        self._every = every
        self._lock = threading.Lock()
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
