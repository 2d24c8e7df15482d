"""Processes for work on what others wrote: limited in memory, and killed when they take too long.

As a script, this file is such a process. It reads one JSON value a line, first the setup with the
file of a module, and answers each with a line. It loads no other module of the package, and so no
jax. It ends when its input ends, also in the middle of work, so that it never survives the process
that started it.
"""

import collections
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEMORY = 512 * 2**20  # bytes by which the work may grow the process, by default
ALREADY_DEAD = 1.0  # seconds within which a process that something else ended is noticed
FAILED = 70  # exit status of a process whose work raised an exception
START_SECONDS = 120.0  # time that the process may take to read its setup


class ClosedError(Exception):
    """The process was closed during the work."""


class FairLock:
    """A lock that the thread that waits longest, and the one that came last, are given by turns.

    So a thread does not wait for all that came before it, and none waits more than twice as long as
    in a queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the fields
        self._held = False
        self._waiting: collections.deque[threading.Event] = collections.deque()
        self._last_is_next = False

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock, and return True; False if it is held and may not be waited for."""
        with self._lock:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:  # such as Ctrl-C
            with self._lock:
                waits = turn in self._waiting
                if waits:
                    self._waiting.remove(turn)
            if not waits:
                self.release()
            raise
        return True

    def release(self) -> None:
        """Give the lock to the next thread."""
        with self._lock:
            if not self._waiting:
                self._held = False
                return
            turn = self._waiting.pop() if self._last_is_next else self._waiting.popleft()
            self._last_is_next = not self._last_is_next
        turn.set()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class LimitedProcess:
    """A process that answers one message at a time. Thread-safe.

    It starts with the first message, and again after its end.

    Args:
      module: file of a module with `prepare`, which returns the function that answers messages.
      setup: argument of `prepare`.
      packages: files of packages that the module imports.
      memory: bytes that the work may take.
      stack: bytes of the stack of a thread that answers.
      niceness: how far the process lets others go first, see `os.nice`.
    """

    def __init__(
        self,
        module: str | None,
        setup: Mapping[str, Any],
        packages: Sequence[str | None],
        *,
        memory: int = MEMORY,
        stack: int,
        niceness: int = 0,
    ):
        self._setup = {
            "module": module,
            "setup": setup,
            "path": [str(Path(package).parents[1]) for package in packages if package],
            "memory": memory,
            "stack": stack,
            "niceness": niceness,
        }
        self._lock = FairLock()  # one message at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._closed = 0  # times

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message, both JSON values.

        Raises:
          TimeoutError: it takes longer.
          EOFError: the work ended the process; the message names its exit status or signal.
          ClosedError: the process was closed meanwhile.
          OSError: the process cannot start.
        """
        with self._lock:
            closed = self._closed
            while True:
                reused = self._runs()
                if not reused:
                    self._start()
                begun = time.monotonic()
                try:
                    return self._exchange(message, seconds)
                except EOFError as error:
                    if closed != self._closed:
                        raise ClosedError from error
                    if reused and time.monotonic() - begun < ALREADY_DEAD:
                        continue  # it may have been ended from outside: try again in a new one
                    raise

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
          OSError: it cannot start.
        """
        with self._lock:
            if not self._runs():
                self._start()

    def close(self) -> None:
        """End the process, in the middle of work too; another message starts it again."""
        self._closed += 1
        if (process := self._process) is not None:
            process.kill()  # without the lock, which is held during the work
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Start the process, in place of one that ended, and give it the setup."""
        self._end()
        # As a script, this file imports no other module of the package.
        from dflash_jax.utils.python_command import python_command

        command = python_command(__file__)
        try:  # in a session of its own, as Ctrl-C in a terminal must not reach it
            process = subprocess.Popen(
                command,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._process = process
            self._finalizer = weakref.finalize(self, _kill, process)
            self._exchange(self._setup, START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise OSError(str(error)) from error

    def _exchange(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message.

        Raises:
          TimeoutError: none came in time; the process is killed.
          EOFError: the process ended; the message names its exit status or signal.
        """
        text = json.dumps(message).encode()
        process = self._process
        expired = threading.Event()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            process.stdin.write(text + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                process.wait(1)  # for its exit status
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            timer.cancel()
            if not answer.endswith(b"\n") or expired.is_set():
                self._end()  # also after an interrupt: its answer would be taken for the next one
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if expired.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s")
        raise EOFError(_status(process.returncode))

    def _end(self) -> None:
        """End the process and wait for it."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None
        self._finalizer = None


def _status(code: int) -> str:
    """Name an exit status as `subprocess` reports it."""
    names = {-number: number.name for number in signal.Signals}
    return names.get(code, f"exit status {code}")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a message was not written
                pipe.close()


# In the process.


def main() -> None:
    """Serve until the input ends."""
    lines = sys.stdin.buffer
    settings = json.loads(lines.readline())
    sys.path += settings["path"]
    answer = _module(settings["module"]).prepare(settings["setup"])
    _limit_memory(settings["memory"])
    if hasattr(os, "nice"):
        os.nice(settings["niceness"])
    threading.stack_size(settings["stack"])
    _reply(None)
    for line in lines:  # a thread works, so that this one sees the end of the input
        threading.Thread(target=_work, args=(answer, line), daemon=True).start()
    os._exit(0)


def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("limited_work", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _work(answer: Callable[[Any], Any], line: bytes) -> None:
    try:
        _reply(answer(json.loads(line)))
    except BaseException:  # the other process would wait for an answer; often it is the memory
        os._exit(FAILED)


def _reply(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _limit_memory(most_added: int) -> None:
    """Limit the growth of the address space, where the system supports that."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        size = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + most_added, most))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    main()
