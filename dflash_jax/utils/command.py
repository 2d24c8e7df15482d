"""How a command ends: errors in one line, signals and pipes that nobody reads without a trace."""

import contextlib
import functools
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

INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C
UNREAD = 141  # and by a closed pipe, as behind `| head`
TERMINATED = 143  # and by SIGTERM
_repeated: list[object] = []  # interrupts that `sent_again` sends, not the user


class Terminated(SystemExit):
    """SIGTERM came. Raised where Ctrl-C would be, so that nothing half-made is left behind."""


def exit_code(name: str, run: Callable[[], int]) -> int:
    """The code a command returns, or that of how else it ended; errors go to standard error.

    SIGPIPE stays ignored, as Python has it: libraries write to sockets that may be closed.
    """
    open_streams()
    try:
        with terminable():
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return UNREAD
    except (DFlashError, OSError) as error:
        sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{name}: interrupted\n")
        return INTERRUPTED
    except Terminated:
        sys.stderr.write(f"\n{name}: terminated\n")
        return TERMINATED
    finally:
        leave_unread()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM an exception while the block runs, and lets neither it nor Ctrl-C get lost.

    Where another handler takes SIGTERM, or outside the main thread, nothing is changed.
    """
    free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(TERMINATED)

    hook = sys.unraisablehook
    signal.signal(signal.SIGTERM, end)
    sys.unraisablehook = functools.partial(sent_again, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def abrupt() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once, without a message, while the block runs.

    For imports: libraries turn an exception in the middle of one into others. Signals that are
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


def end_silently() -> None:
    """Have a Ctrl-C that comes while the interpreter ends show no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait until the block, which should be short, has ended."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread() or None in before.values():
        yield
        return
    came: list[int] = []
    for number in numbers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def counted_interrupts() -> Iterator[Callable[[], int]]:
    """Count each Ctrl-C while the block runs, in the main thread.

    Python raises one exception for all that come while code outside it runs, such as a step of a
    large model.

    Yields:
      A function that returns how many came since it was last called.
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


def sent_again(hook: Callable[[Any], object], lost: Any) -> None:
    """Repeats a signal whose exception Python dropped: jax runs code in garbage collection, where
    nothing can be raised, and as much as every seventh signal while it traces comes there.
    """
    numbers = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}
    if lost.exc_type in numbers:
        _repeated.extend([lost.exc_type] * (lost.exc_type is KeyboardInterrupt))
        threading.Timer(0.01, os.kill, (os.getpid(), numbers[lost.exc_type])).start()
    else:
        hook(lost)


def open_streams() -> None:
    """Standard streams that were closed are empty ones: Python makes them None."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names in files may be none it can encode
        sys.stdout.reconfigure(errors="backslashreplace")


def leave_unread() -> None:
    """What a stream cannot get rid of goes nowhere: Python would complain at the very end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
