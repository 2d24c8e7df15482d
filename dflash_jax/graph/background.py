"""Compiling programs in one thread of low priority, or in another process, while others decode."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Iterable

from dflash_jax.graph.build import CompiledPrograms, can_be_compiled_elsewhere
from dflash_jax.graph.compile_process import CompileProcess
from dflash_jax.graph.keys import Variant

log = logging.getLogger("dflash_jax.graph")
# Seconds of compiling for which another process is started, which takes some itself.
WORTH_A_PROCESS = 12.0
# Added to the nice value of the thread, which holds Python's lock while it traces and lowers. With
# a higher value, other threads would wait for a thread that a busy machine does not schedule.
NICENESS = 5


@dataclasses.dataclass(eq=False)
class _CompileJob:
    compiled: CompiledPrograms
    variants: tuple[Variant, ...]
    urgent: bool
    future: concurrent.futures.Future[None]


class BackgroundCompiler:
    """Compiles the variants of any number of engines, one program at a time, urgent ones first.

    Those that nobody waits for are compiled by another process where that can keep them on disk,
    and by a thread of this one elsewhere.
    """

    def __init__(self) -> None:
        self._jobs: list[_CompileJob] = []
        self._lock = threading.Lock()
        self._running = self._stopped = False
        self._process = CompileProcess()
        self._changed = threading.Event()  # a job was added, or the other process is done

    @property
    def compiling(self) -> bool:
        """Whether the thread is running; after `stop` it ends with its current program."""
        return self._running

    def want(
        self, compiled: CompiledPrograms, variants: Iterable[Variant], *, urgent: bool = False
    ) -> concurrent.futures.Future[None]:
        """Queue variants to be compiled; those that a request waits for are urgent.

        Returns:
          A future that completes when they are compiled, or with the error of compiling them. It
          is cancelled by `stop`.
        """
        job = _CompileJob(compiled, tuple(variants), urgent, concurrent.futures.Future())
        compiled.want(job.variants)
        with self._lock:
            if not compiled.missing(job.variants):
                job.future.set_result(None)
            elif self._stopped:
                job.future.cancel()
            else:
                self._jobs.append(job)
                self._changed.set()
                if not self._running:
                    self._running = True
                    # Not a daemon: Python aborts if it ends while XLA compiles in one.
                    threading.Thread(target=self._run, name="compiler", daemon=False).start()
        return job.future

    def stop(self) -> None:
        """Cancel all jobs and end the thread after its current program."""
        with self._lock:
            self._stopped = True
            jobs = self._jobs
            self._jobs = []
        self._process.stop()
        for job in jobs:
            job.future.cancel()

    def _run(self) -> None:
        lower_priority()
        while job := self._next():
            try:
                if job.urgent or self._compiled_elsewhere(job):
                    job.compiled.compile_next(job.variants)
            except Exception as error:
                log.error("compiling %s failed: %s", ", ".join(job.variants), error)
                self._end([job], error)
            self._end([job for job in self._jobs if not job.compiled.missing(job.variants)])

    def _compiled_elsewhere(self, job: _CompileJob) -> bool:
        """Have the other process compile a job's next program; return False if that has to wait.

        It does if urgent jobs came, or the compiler was stopped. True if the program is on disk
        now, or cannot be.
        """
        program = job.compiled.next_program(job.variants)
        wanted: set[Variant] = set()
        for other in list(self._jobs):
            wanted.update(other.variants)
        worth = self._process.usable and job.compiled.estimate_s(wanted) > WORTH_A_PROCESS
        if program is None or not worth or not can_be_compiled_elsewhere(program):
            return True
        done = self._process.compile(program)
        done.add_done_callback(lambda _: self._changed.set())
        while not done.done():
            self._changed.wait()
            self._changed.clear()
            if any(other.urgent for other in list(self._jobs)):
                return False
        return not self._stopped

    def _next(self) -> _CompileJob | None:
        """Return the most urgent job; None, which ends the thread, if there is none."""
        with self._lock:
            self._running = bool(self._jobs)
            if not self._jobs:
                self._process.rest()
                log.info("nothing is left to compile")
            return min(self._jobs, key=lambda job: not job.urgent, default=None)

    def _end(self, jobs: list[_CompileJob], error: Exception | None = None) -> None:
        with self._lock:
            ended = [job for job in jobs if job in self._jobs]
            self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:  # outside the lock: callbacks may queue more
            if error is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(error)


def lower_priority() -> None:
    """Lower this thread's priority by `NICENESS`, if threads have priorities of their own."""
    if sys.platform == "linux":
        number = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, number) + NICENESS
            os.setpriority(os.PRIO_PROCESS, number, min(niceness, 19))
