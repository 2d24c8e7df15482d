"""Compile programs in a process of the lowest priority, which keeps them on disk.

Tracing and lowering hold Python's lock, so that a server that compiles next to its requests answers
more slowly. Another process does not hold it up, and `stored.StoredPrograms` gives what it compiled
to this one.

The processes exchange pickled programs for lines: `kept`, or why a program is not.
"""

import concurrent.futures
import contextlib
import logging
import os
import pickle
import subprocess
import sys
from typing import IO, Any

import jax

from dflash_jax.graph.programs import Program
from dflash_jax.utils.python_command import python_command

log = logging.getLogger("dflash_jax.graph")
KEPT = "kept"
LOWEST = 19  # niceness
SCALARS = bool | int | float | str | None


class CompileProcess:
    """A process that compiles one program after the other; it is started by the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compile-process")
        self.usable = True  # until it fails once

    def compile(self, program: Program) -> concurrent.futures.Future[bool]:
        """Return a future of whether the program is kept on disk."""
        return self._thread.submit(self._compile, program)

    def _compile(self, program: Program) -> bool:
        try:
            answer = self._ask(program)
        except (OSError, ValueError, AttributeError, TypeError, pickle.PicklingError) as error:
            answer = f"{type(error).__name__}: {error}"
        if answer != KEPT:
            self.usable = False
            log.info("%s is compiled by this process: %s", program.key, answer)
            self.rest()
        return answer == KEPT

    def _ask(self, program: Program) -> str:
        frames = [pickle.dumps(program)]
        process = self._process
        if process is None:
            frames.insert(0, pickle.dumps(_settings()))
            self._process = process = subprocess.Popen(
                python_command("-m", "dflash_jax.graph.compile_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        for frame in frames:
            process.stdin.write(len(frame).to_bytes(8, "little") + frame)
        process.stdin.flush()
        line = process.stdout.readline().decode(errors="replace").strip()
        return line or "the process that compiles ended"

    def stop(self) -> None:
        """End the process, even while it compiles."""
        self.usable = False
        self.rest()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def rest(self) -> None:
        """End the process; the next program starts another one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()


def _settings() -> dict[str, SCALARS]:
    """Return JAX's settings, as programs depend on them."""
    values: dict[str, Any] = jax.config.values
    return {name: value for name, value in values.items() if isinstance(value, SCALARS)}


def _read(stream: IO[bytes]) -> Any:
    size = int.from_bytes(stream.read(8), "little")
    return pickle.loads(stream.read(size)) if size else None


def lowest_priority() -> None:
    """Let this process run only where nobody else wants the processor.

    A process of a high nice value ends its time slice, some milliseconds, before a thread that
    woke up gets the processor, and the threads of native kernels sleep and wake many times in a
    step. Linux's idle policy gives it up at once.
    """
    with contextlib.suppress(OSError):
        os.nice(LOWEST)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Compile programs from the standard input until it ends."""
    from dflash_jax.graph.build import compile_programs
    from dflash_jax.kernels.native.build import library

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what else is printed is no answer
    lowest_priority()
    own = _settings()
    for name, value in _read(sys.stdin.buffer).items():
        if own.get(name) != value:
            jax.config.update(name, value)
    library()  # programs call its kernels
    while (program := _read(sys.stdin.buffer)) is not None:
        try:
            compile_programs([program], workers=1)
            answer = KEPT
        except Exception as error:
            answer = " ".join(f"{type(error).__name__}: {error}".split())
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
