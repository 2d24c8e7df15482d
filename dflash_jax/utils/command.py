"""Exit codes and signal handling of commands; no tracebacks."""

import contextlib
import functools
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from dflash_jax.errors import DFlashError

INTERRUPTED = 130  # the shell's exit code for a process ended by Ctrl-C
PIPE_CLOSED = 141  # the same for a closed pipe, as in `| head`
TERMINATED = 143  # the same for SIGTERM
_repeated: list[object] = []  # interrupts sent by `resend_signal`, not by the user


class Terminated(SystemExit):
    """SIGTERM arrived. Raised like KeyboardInterrupt, so that cleanup runs."""


def exit_code(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors become one line on standard error.

    SIGPIPE stays ignored, which is Python's default: libraries write to sockets that may be closed.

    Args:
      name: name of the command, for messages.
      run: the command; returns an exit code.
    """
    open_streams()
    try:
        with sigterm_as_exception():
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return PIPE_CLOSED
    except (DFlashError, OSError) as error:
        sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        # Training says what it saved.
        sys.stderr.write(f"\n{name}: {str(interrupt) or 'interrupted'}\n")
        return INTERRUPTED
    except Terminated:
        sys.stderr.write(f"\n{name}: terminated\n")
        return TERMINATED
    finally:
        discard_unwritable()


@contextlib.contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM while the block runs, and repeat signals that get lost.

    Does nothing if SIGTERM has another handler, or outside the main thread.
    """
    free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(TERMINATED)

    hook = sys.unraisablehook
    signal.signal(signal.SIGTERM, end)
    sys.unraisablehook = functools.partial(resend_signal, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once, without a message, while the block runs.

    For imports: libraries convert exceptions during an import to other ones. Signals that are
    ignored, as in background jobs, stay ignored. Does nothing outside the main thread.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    caught = {number: handler for number, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        caught = {}
    try:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def exit_quietly() -> None:
    """Show no traceback on Ctrl-C while the interpreter shuts down, and have it end at once.

    Its last garbage collection looks at all objects, which takes up to a second beside JAX and a
    model; the process's memory is freed anyway.
    """
    gc.freeze()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Delay Ctrl-C and SIGTERM until the end of the block, which should be short.

    Yields:
      The numbers of the signals that arrived, so that a long block can end early.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread() or None in before.values():
        yield arrived
        return
    for number in numbers:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextlib.contextmanager
def counted_interrupts() -> Iterator[Callable[[], int]]:
    """Count each Ctrl-C while the block runs, in the main thread.

    Python raises one exception for all that arrive while native code runs, such as a step of a
    large model.

    Yields:
      A function that returns the number of interrupts since its last call.
    """
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def count() -> int:
        repeated = len(_repeated)
        del _repeated[:repeated]
        try:
            return os.read(read, 1 << 16).count(signal.SIGINT) - repeated
        except BlockingIOError:
            return 0

    try:
        yield count
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def resend_signal(hook: Callable[[Any], object], lost: Any) -> None:
    """Repeat a signal whose exception Python dropped; an `unraisablehook`.

    JAX runs Python code during garbage collection, where exceptions are dropped. While it traces,
    up to every seventh signal arrives there.
    """
    numbers = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}
    if lost.exc_type in numbers:
        if lost.exc_type is KeyboardInterrupt:
            _repeated.append(lost.exc_type)
        started = False
        while not started:  # again if the signal arrives before the timer's start returns
            with contextlib.suppress(lost.exc_type):
                threading.Timer(0.01, os.kill, (os.getpid(), numbers[lost.exc_type])).start()
                started = True
    else:
        hook(lost)


def open_streams() -> None:
    """Replace closed standard streams, which are None, by the null device."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # output may contain characters it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_unwritable() -> None:
    """Discard output that cannot be written; Python would report it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
