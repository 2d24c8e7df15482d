"""Start workers as child processes of this one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import dflash_jax
from dflash_jax.utils.python_command import python_command

TOKEN = "DFLASH_HOSTS_TOKEN"  # environment variable of a worker
LOOPBACK = "127.0.0.1"
KILL_S = 10.0  # seconds in which a killed process ends


class WorkerProcess(Protocol):
    """A worker's process, on any host."""

    @property
    def name(self) -> str:
        """What error messages call the process."""

    def status(self) -> str | None:
        """Return how the process ended; None while it runs."""

    def kill(self) -> None:
        """Kill the process, also one that is stopped, and wait for its end."""


class Launcher(Protocol):
    """Starts workers.

    Attributes:
      address: on which the front listens, reachable from all workers.
    """

    address: str

    def start(self, index: int, front: str, token: str) -> WorkerProcess:
        """Start a worker that connects to the front at HOST:PORT."""

    def close(self) -> None:
        """Free what `start` reserved, once all workers ended."""


def start_module(
    words: Sequence[str], variables: dict[str, str], **streams: Any
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
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
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


class ChildProcess:
    """A worker as a child of this process, in a session of its own.

    Args:
      index: of the worker.
      front: HOST:PORT of the front.
      token: by which front and worker know each other.
      address: where other workers reach this one.
    """

    def __init__(self, index: int, front: str, token: str, address: str):
        self._process = start_module(
            ("dflash_jax.hosts.worker", front, str(index), address),
            {TOKEN: token},
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
        )

    @property
    def name(self) -> str:
        """The process id."""
        return f"process {self._process.pid}"

    def status(self) -> str | None:
        """Return the exit status or signal; None while the process runs."""
        code = self._process.poll()
        if code is None:
            return None
        names = {-number: number.name for number in signal.Signals}
        return f"ended by {names[code]}" if code in names else f"ended with exit status {code}"

    def kill(self) -> None:
        """Kill the process and its children, and wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            kill_session(self._process, KILL_S)


class ChildLauncher:
    """Starts all workers on this machine."""

    address = LOOPBACK

    def start(self, index: int, front: str, token: str) -> WorkerProcess:
        """Start a worker."""
        return ChildProcess(index, front, token, LOOPBACK)

    def close(self) -> None:
        """Do nothing: nothing is reserved."""


def _has_descriptor() -> bool:
    """Return whether standard error is a file, which tests and notebooks may replace."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
