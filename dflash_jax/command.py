"""How a command ends: errors in one line, Ctrl-C and pipes that nobody reads without a trace."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dflash_jax.errors import DFlashError

INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C
UNREAD = 141  # and by a closed pipe, as behind `| head`


def exit_code(name: str, run: Callable[[], int]) -> int:
    """The code a command returns, or that of how else it ended; errors go to standard error.

    SIGPIPE stays ignored, as Python has it: libraries write to sockets that may be closed.
    """
    open_streams()
    try:
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
    finally:
        leave_unread()


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
