"""Processes of this package that run next to this one, and how they end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import dflash_jax
from dflash_jax.utils.python_command import python_command

END_S = 30.0  # seconds in which all processes of a group end at the end of a run
TOLD_S = 6.0  # seconds in which a process that ended too soon is named by its group


def start_module(
    words: Sequence[str], variables: dict[str, str] | None = None, **streams: Any
) -> subprocess.Popen[Any]:
    """Start a module of this package in a session of its own, which Ctrl-C does not reach.

    Args:
      words: the module's name, and arguments.
      variables: of its environment, in addition to those of this process.
    """
    root = str(Path(dflash_jax.__file__).parents[1])
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        python_command("-m", *words),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {}),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **streams,
    )


def kill_session(process: subprocess.Popen[Any], seconds: float | None = None) -> None:
    """Kill a process of `start_module` and its children, and wait for its end.

    Raises:
      TimeoutExpired: it did not end within these seconds.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(seconds)


def how_it_ended(code: int) -> str:
    """Return in words how a process with such a return code ended."""
    names = {-number: number.name for number in signal.Signals}
    return f"ended by {names[code]}" if code in names else f"ended with exit status {code}"


def end_process(text: str, code: int) -> NoReturn:
    """Print an error, if it has a text, and end this process at once."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
        sys.stderr.write(cursor + (f"dflash-jax: {text}\n" if text else ""))
        sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def on_this_machine(words: Callable[[int], Sequence[str]], size: int) -> Iterator[None]:
    """Run processes 1 to size - 1 of a group on this machine while the block runs.

    One that fails ends this process. They are in sessions of their own, so that Ctrl-C
    reaches process 0 only, which ends all.

    Args:
      words: returns the module that a process runs, and its arguments.
    """
    ending = threading.Event()
    with contextlib.ExitStack() as entered:
        for index in range(1, size):
            process = entered.enter_context(_process(words(index)))
            threading.Thread(target=_report, args=(index, process, ending), daemon=True).start()
        try:
            yield
        finally:
            ending.set()


@contextlib.contextmanager
def _process(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with start_module(words, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            process.kill()


def _report(index: int, process: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """End this process if another one fails, and has told nobody why."""
    code = process.wait()
    if code != 0 and not ending.wait(TOLD_S):
        end_process(f"HostError: host {index} (process {process.pid}) {how_it_ended(code)}", 1)
