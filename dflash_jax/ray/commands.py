"""Commands that run in processes of their own, whose output and signals are passed on."""

import contextlib
import math
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dflash_jax.trainer.loop import StopFlag, stop_flag
from dflash_jax.utils.child_processes import END_S, kill_session, start_module

PATIENCE = 2 * END_S  # seconds for the others to end after one of them
POLL = 0.3  # seconds between two questions to a command
LAST = 30.0  # seconds for the last lines of one that ended

Line = tuple[str, str]  # "stdout" or "stderr", and text without its end
Show = Callable[[str, str], object]  # called with a line


class Command(Protocol):
    """A command that runs."""

    def poll(self) -> tuple[list[Line], int | None]:
        """Return the lines since the last call, and the exit code after the last of them."""

    def signal(self, number: int) -> None:
        """Send a signal to the command."""

    def kill(self) -> None:
        """Kill the command and its children."""


class CommandProcess:
    """A command of `dflash-jax` in a process of its own.

    Its lines are read from pipes: once nobody reads them, the next one ends it.
    """

    def __init__(self, words: Sequence[str]):
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._process = start_module(
            ("dflash_jax", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}.items()
        self._readers = [threading.Thread(target=self._read, args=x, daemon=True) for x in streams]
        for reader in self._readers:
            reader.start()

    def poll(self) -> tuple[list[Line], int | None]:
        """See `Command`."""
        code = self._process.poll()
        lines = []
        if code is not None:
            for reader in self._readers:
                reader.join(LAST)
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines, code

    def signal(self, number: int) -> None:
        """See `Command`."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """See `Command`."""
        kill_session(self._process)

    def _read(self, name: str, stream: Any) -> None:
        with stream:
            for line in stream:
                self._lines.put((name, line.decode(errors="replace").rstrip("\n")))


def follow(commands: Sequence[Command], show: Show, stop: StopFlag) -> list[int]:
    """Wait until all commands ended, and return their exit codes.

    A stop is passed on to the first command, which stops the others. Lines of the others are shown
    only if they end with an error that the first one did not show. Commands that outlive a stop or
    a failed one by `PATIENCE` seconds are killed.
    """
    codes: list[int | None] = [None] * len(commands)
    said: list[list[str]] = [[] for _ in commands]
    until = math.inf
    passed_on = False
    try:
        while None in codes and time.monotonic() < until:
            for i, command in enumerate(commands):
                if codes[i] is not None:
                    continue
                lines, codes[i] = command.poll()
                said[i] += [text for _, text in lines]
                for line in lines if i == 0 else ():
                    show(*line)
            if stop.raised and not passed_on:
                passed_on = True
                commands[0].signal(signal.SIGTERM)
            if until == math.inf and (passed_on or any(codes)):
                until = time.monotonic() + PATIENCE
            time.sleep(POLL)
    finally:
        for command in commands:
            command.kill()
    for i, (code, lines) in enumerate(zip(codes, said, strict=True)):
        for line in lines if code != 0 else ():
            if line not in said[0]:
                show("stderr", f"host {i}: {line}")
    return [-signal.SIGKILL if code is None else code for code in codes]


def run_here(words: Sequence[str], show: Show) -> int:
    """Run a command in a process of this machine, and return its exit code."""
    with stop_flag() as stop:
        [code] = follow([CommandProcess(words)], show, stop)
    return code if code >= 0 else 1
