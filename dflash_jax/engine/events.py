"""Log recovery events, without any text of prompts or outputs.

`Stats.recovery` counts the events; the logger `dflash_jax.recovery` and an optional capped file
record when they happened.
"""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("dflash_jax.recovery")
logger.addHandler(logging.NullHandler())

NAME = "recovery.jsonl"
OLD = "recovery.jsonl.1"
CAP = 2**20  # bytes of one file; one older file is kept


class EventLog:
    """Reports events of one engine to the logger, and to files in directories.

    Attributes:
      failures: number of events that a file or a handler failed to take.
    """

    def __init__(self) -> None:
        self.failures = 0

    def report(
        self,
        kind: str,
        request: int,
        *,
        label: str = "",
        directory: str | None = None,
        **figures: int,
    ) -> None:
        """Report one event. A file or handler that fails is counted; the request goes on.

        Args:
          request: number of the request in this process.
          label: the caller's name of the request, such as the id in an HTTP response.
          directory: the directory of a file that takes the event too.
          figures: numbers to report with the event.
        """
        record: dict[str, str | int] = {"event": kind, "request": request}
        if label:
            record["id"] = label
        record |= figures
        described = ", ".join(f"{name} {value}" for name, value in figures.items())
        try:
            logger.info(
                "%s recovery: %s (%s)", label or request, kind, described, extra={"dflash": record}
            )
        except Exception:  # handlers are user code
            self.failures += 1
        if directory is not None:
            try:
                append(Path(directory), json.dumps(record) + "\n")
            except (OSError, ValueError):  # ValueError: an invalid file name
                self.failures += 1


def append(directory: Path, line: str) -> None:
    """Append a line to the directory's event file, which stays below its cap.

    The file is checked by its descriptor, so that it cannot be exchanged in between.

    Raises:
      OSError: the file is a link, a pipe, a folder, of another user, or cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _opened(folder) as file:
            full = os.fstat(file).st_size + len(line.encode()) > CAP
        if full:
            os.rename(NAME, OLD, src_dir_fd=folder, dst_dir_fd=folder)
        with _opened(folder) as file:
            os.write(file, line.encode())
    finally:
        os.close(folder)


@contextlib.contextmanager
def _opened(folder: int) -> Iterator[int]:
    """Open the event file of a folder, which is given by a descriptor, and check it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not block
    file = os.open(NAME, flags, 0o600, dir_fd=folder)
    try:
        status = os.fstat(file)
        is_ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        if not (stat.S_ISREG(status.st_mode) and is_ours and status.st_nlink == 1):
            raise OSError(f"{NAME} is not a plain file of ours")
        yield file
    finally:
        os.close(file)
