"""Processes of servers: their start and end, their CPU time and memory."""

import contextlib
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

PATIENCE = 600.0  # seconds in which a server has to start
ENDING = 60.0  # seconds in which it has to end


@dataclasses.dataclass(frozen=True)
class ServerProcess:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    descriptors: int | None = None,
    log: Path | None = None,
) -> Iterator[ServerProcess]:
    """Start a server that prints its address and has a route /ready; yield it once it is ready.

    Args:
      environment: variables beside those of this process.
      folder: working folder of the server.
      descriptors: limit of its file descriptors.
      log: file to which its standard error is appended.
    """
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    with (
        (log or Path(os.devnull)).open("a") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=os.environ | dict(environment or {}),
        ) as process,
    ):
        try:
            url = _address(process, log)
            deadline = time.monotonic() + PATIENCE
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{url} is not ready; exit code {process.poll()}")
                time.sleep(0.1)
            yield ServerProcess(process, url)
        finally:
            end(process)


def _address(process: subprocess.Popen[str], log: Path | None) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if address := re.search(r"http://\S+", line):
            return address[0]
    code = process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")[-1000:] if log else ""
    raise SystemExit(f"the server ended with exit code {code}\n{said}")


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 200
    return False


def end(process: subprocess.Popen) -> None:
    """End a process, by force if it takes long."""
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_s(first: int) -> float:
    """Return the CPU seconds of a process and of all that it started, as far as they are known."""
    ticks = 0
    for number in process_ids(first):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(first: int) -> dict[str, float]:
    """Return the resident memory of a process and of all that it started, now and at most."""
    sizes = {"resident": 0.0, "peak": 0.0}
    for number in process_ids(first):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{number}/status").read_text().splitlines():
                for name, field in (("resident", "VmRSS:"), ("peak", "VmHWM:")):
                    if line.startswith(field):
                        sizes[name] += int(line.split()[1]) * 1024 / 1e6
    return {name: round(size, 1) for name, size in sizes.items()}


def process_ids(first: int) -> list[int]:
    """Return the numbers of a process and of all that it started; none if they are not known."""
    numbers: list[int] = []
    rest = [first]
    while rest:
        number = rest.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{number}/task").iterdir():
                rest += map(int, (task / "children").read_text().split())
            numbers.append(number)
    return numbers
