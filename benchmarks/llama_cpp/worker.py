"""Worker processes that load models once and answer requests: ours, and llama.cpp's.

A request is a line, an answer an object of JSON. `llama_worker.cpp` lists the requests; the
prebuilt llama.cpp has further ones (`prebuilt.py`).
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
# Bytecode is cached, as in an installation.
INHERITED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
PATIENCE = 900.0  # seconds for loading and compiling, and for an answer


class WorkerError(RuntimeError):
    """A worker cannot be built, or ended, or did not answer in time."""


def our_command(
    target: Path,
    plan: Mapping[str, Any],
    *,
    drafter: Path | None = None,
    forced: bool = False,
    warm_up: bool = True,
) -> list[str]:
    """Return the command of a worker with our engine.

    Args:
      forced: requests say how many drafts are accepted.
    """
    command = [sys.executable, "-m", "benchmarks.llama_cpp.ours", str(target)]
    command += ["--plan", json.dumps(plan)]
    if drafter is not None:
        command += ["--drafter", str(drafter)]
        command += ["--forced"] if forced else []
    return command if warm_up else [*command, "--no-warm-up"]


def prebuilt_command(
    python: str, model: Path | None, *, cores: int, context: int, float32: bool = False
) -> list[str]:
    """Return the command of a worker with the prebuilt llama.cpp.

    Args:
      python: the interpreter of an environment with `pip install xllamacpp`.
      model: a GGUF file, or None for requests that need no model.
      context: number of tokens.
      float32: keys and values are kept in float32, and logits are all that is computed.
    """
    script = Path(__file__).with_name("prebuilt.py")
    command = [python, "-P", str(script), str(model or "-"), str(cores), str(context)]
    return [*command, "--float32"] if float32 else command


class Worker:
    """A process pinned to cores, and the requests it answers one by one."""

    def __init__(
        self, command: Sequence[str], cores: int, *, environment: Mapping[str, str] | None = None
    ):
        """Start the process and wait until it has loaded its models.

        Args:
          cores: how many it may use; the first ones of this process.

        Raises:
          WorkerError: it ended instead.
        """
        chosen = sorted(os.sched_getaffinity(0))[:cores]
        if len(chosen) < cores:
            raise WorkerError(f"{cores} cores were asked for; this process has {len(chosen)}")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, chosen)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,  # `select` sees no lines that Python has read already
            cwd=ROOT,
            env=INHERITED | dict(environment or {}),
        )
        try:
            self.first = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
          WorkerError: the process ended, or does not answer.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._ended()) from error
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        """Return the next line that is an object; libraries may print others."""
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(PATIENCE):
                line = self._process.stdout.readline()
                if not line:
                    raise WorkerError(self._ended())
                if line.startswith(b"{"):
                    return json.loads(line)
        raise WorkerError(f"a worker did not answer in {PATIENCE:.0f} s")

    def _ended(self) -> str:
        code = self._process.wait(10)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return f"a worker ended with code {code}:\n{text[-2000:]}"
