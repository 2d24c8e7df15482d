"""Recordings: files of the turns of an engine, by which another process can run them again.

The first line has everything that the turns depend on: versions, models and plan. Each other line
is a turn, see `TurnRecorder`. A recording has the prompts of all requests, as token ids, so only
its user may read it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
from pathlib import Path
from typing import BinaryIO

import jax

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.turns.turn_recorder import END, Line, TurnRecorder
from dflash_jax.errors import RequestError
from dflash_jax.version import __version__

log = logging.getLogger("dflash_jax.engine")

VERSION = 1  # of the format
MOST_BYTES = 2**28  # most bytes of a recording; later turns are not recorded


def record_turns(engine: Engine, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Write all turns of an engine to a new file, until the file is full or the engine closes.

    Args:
      path: the file, which must not exist.
      most_bytes: most bytes of the file.

    Raises:
      RequestError: the file exists, or cannot be created; or turns also depend on other files.
    """
    if engine.plan.prefix_folder:
        raise RequestError(
            "turns cannot be recorded with prefix_folder: they also depend on what is in the"
            " folder; leave it out"
        )
    file = _RecordingFile(path, about(engine), most_bytes)
    engine.core.recorder = TurnRecorder(file.write)


def about(engine: Engine) -> Line:
    """Return everything that turns depend on besides their events, as JSON values."""
    graph = engine.graph
    executor = engine.core.runner.executor
    digest = hashlib.sha256(executor.digest)
    digest.update(repr((graph.config, graph.drafter_config)).encode())
    if engine.tokenizer is not None:
        digest.update(engine.tokenizer.core.to_str().encode())
    return {
        "versions": {
            "dflash_jax": __version__,
            "jax": jax.__version__,
            "jaxlib": _version("jaxlib"),
            "llguidance": _version("llguidance"),
        },
        "platform": executor.platform,
        "model": {
            "target": graph.target_name,
            "drafter": graph.drafter_name,
            "digest": digest.hexdigest()[:32],
        },
        "plan": engine.plan.to_json(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class _RecordingFile:
    """A new file with one JSON object a line, up to a size. Only its user may read it."""

    def __init__(self, path: Path, first: Line, most_bytes: int):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            raise RequestError(
                f"{path} exists; give the name of a new file for the recording, or remove it"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"{path} cannot be created for a recording: {reason}") from None
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", buffering=0)
        self._path = path
        self._left = most_bytes  # number of bytes that may still be written
        self.write({"recording": VERSION} | first)

    def write(self, line: Line) -> None:
        """Append a line. A line that cannot be written ends the recording, and nothing else."""
        if self._file is None:
            return
        try:
            text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            if len(text) > self._left:
                self._end("the recording has as many bytes as it may")
                return
            self._file.write(text)
        except (OSError, TypeError, ValueError) as error:
            self._end(f"a turn could not be written: {error}")
            return
        self._left -= len(text)
        if END in line:
            self._close()

    def _end(self, reason: str) -> None:
        log.warning("%s: later turns are not recorded: %s", self._path, reason)
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.write(json.dumps({END: reason}).encode() + b"\n")
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
