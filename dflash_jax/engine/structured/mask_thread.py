"""Compute masks in a thread of their own, so that no grammar blocks the engine."""

import queue
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from dflash_jax.engine.structured.grammars import Grammar

SECONDS = 5.0  # that the masks of one row may take; they take milliseconds
Task = tuple[Grammar, np.ndarray, list[int]]  # a grammar, and the arguments of its `fill`


class MaskThread:
    """A thread that fills masks. It is abandoned, and replaced, if a grammar does not return.

    The compiler's code cannot be interrupted. Work on a mask is bounded, so that only an error of
    the compiler makes it take so long.
    """

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[_Batch | None] | None = None

    def fill(self, tasks: Sequence[Task]) -> None:
        """Fill the masks of rows; a grammar that takes longer than `SECONDS` gives up."""
        left = list(tasks)
        while left:
            batch = _Batch(left)
            if self._batches is None:
                self._batches = queue.SimpleQueue()
                weakref.finalize(self, self._batches.put, None)
                arguments = (self._batches,)
                threading.Thread(target=_run, args=arguments, name="masks", daemon=True).start()
            self._batches.put(batch)
            if batch.wait():
                return
            stuck = batch.abandon()
            left[stuck][0].give_up(f"its masks took longer than {SECONDS:g} s")
            left, self._batches = left[stuck + 1 :], None


class _Batch:
    """Tasks of one step, and their progress."""

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = tasks
        self._done = 0  # tasks
        self._abandoned = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # of the three above
        self._ended = threading.Event()

    def run(self) -> None:
        """Fill the masks, unless the batch is abandoned meanwhile; in the thread."""
        try:
            for grammar, masks, drafts in self._tasks:
                grammar.fill(masks, drafts)
                with self._lock:
                    self._done += 1
                    if self._abandoned:
                        return
        except BaseException as error:  # raised where the batch is waited for
            self._error = error
        self._ended.set()

    def wait(self) -> bool:
        """Wait for the masks; return False if a task takes longer than `SECONDS`."""
        seen = -1
        while not self._ended.wait(SECONDS):
            if self._done == seen:
                return False
            seen = self._done
        if self._error is not None:
            raise self._error
        return True

    def abandon(self) -> int:
        """Start no further task; return the number of the task that does not end."""
        with self._lock:
            self._abandoned = True
            return min(self._done, len(self._tasks) - 1)


def _run(batches: "queue.SimpleQueue[_Batch | None]") -> None:
    while (batch := batches.get()) is not None:
        batch.run()
        del batch  # it holds grammars and masks
