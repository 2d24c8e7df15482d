"""Where a request for one token spends its time, beside a route of bare Starlette.

    python -m benchmarks.latency --json benchmarks/results/latency.json
    python -m benchmarks.latency --over FOLDER  # also of another version, with dflash_jax in FOLDER

Each server runs alone in a process of its own (`latency_server`), on a CPU. A client sends one
request after the other on a connection that it keeps. The server notes when a request passes the
stages of its way, by the clock that the client reads, too. "Our part" is the time between sending
a request and having its last byte, without the step of the device. The median is taken of each
line by itself, so that those of the stages do not add up to that of the whole.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result
from benchmarks.latency_server import DEVICE, STAGES
from benchmarks.paired import markdown
from benchmarks.processes import ServerProcess, started

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}
WARM_UP = 50  # requests before those that count
ROOT = Path(__file__).parents[1]


class Client:
    """A client that keeps its connection."""

    def __init__(self, url: str):
        address = urllib.parse.urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def ask(self, path: str, body: bytes = b"") -> tuple[int, float, float]:
        """Send a request, POST if it has a body; return the status, and its begin and end."""
        method = "POST" if body else "GET"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = time.perf_counter()
        self._socket.sendall(head.encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._read()
        headers, _, content = answer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", headers)
        if length is None:
            raise ConnectionError(f"the response has no length: {headers!r}")
        while len(content) < int(length[1]):
            content += self._read()
        return int(headers.split()[1]), sent, time.perf_counter()

    def _read(self) -> bytes:
        data = self._socket.recv(2**16)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


def serving(
    arguments: Sequence[str], source: Path
) -> contextlib.AbstractContextManager[ServerProcess]:
    """Return a server in a process, which runs meanwhile.

    Args:
      arguments: arguments of `latency_server`.
      source: the folder that holds `dflash_jax`.
    """
    command = [sys.executable, "-m", "benchmarks.latency_server", *arguments]
    path = os.pathsep.join([str(source), str(ROOT)])
    return started(command, environment={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}, folder=source)


def asked(client: Client, path: str, count: int) -> list[tuple[float, float]]:
    """Return when requests for one token were sent and answered."""
    body = json.dumps(BODIES[path]).encode()
    times = [client.ask(path, body) for _ in range(WARM_UP + count)][WARM_UP:]
    if any(status != 200 for status, _, _ in times):
        raise SystemExit(f"{path} answered with {times[-1][0]}")
    return [(sent, answered) for _, sent, answered in times]


def of_server(path: str, count: int, source: Path) -> dict[str, float]:
    """Return the median of each stage, of the whole and of our part, in milliseconds.

    The lowest tenth of our part is there for machines that others use, too.
    """
    with tempfile.TemporaryDirectory() as name:
        marks = Path(name) / "marks.json"
        with (
            serving(["served", str(marks)], source) as server,
            contextlib.closing(Client(server.url)) as client,
        ):
            times = asked(client, path, count)
        noted = json.loads(marks.read_text(encoding="utf-8"))[-count:]
    columns: dict[str, list[float]] = {name: [] for name in [*STAGES, "in all", "our part"]}
    for (sent, answered), marked in zip(times, noted, strict=True):
        at = sent
        here = marked | {"answered": answered}
        for name, mark in STAGES.items():
            columns[name].append(here[mark] - at)
            at = here[mark]
        columns["in all"].append(answered - sent)
        columns["our part"].append(answered - sent - columns[DEVICE][-1])
    medians = {name: statistics.median(column) * 1e3 for name, column in columns.items()}
    fastest = sorted(columns["our part"])[: max(count // 10, 1)]
    return medians | {"our part, below which a tenth is": fastest[-1] * 1e3}


def of_bare(path: str, count: int) -> float:
    """Return the median time of the bare route, in milliseconds."""
    with (
        serving(["bare"], ROOT) as server,
        contextlib.closing(Client(server.url)) as client,
    ):
        return statistics.median(b - a for a, b in asked(client, path, count)) * 1e3


def table(figures: dict[str, Any]) -> list[str]:
    """Return the figures of one path in Markdown."""
    columns = [name for name in ("before", "now") if name in figures]
    rows = [
        [name, *(f"{figures[column][name]:.2f}" for column in columns)] for name in figures["now"]
    ]
    rows.append(["bare Starlette, in all", *([""] * (len(columns) - 1)), f"{figures['bare']:.2f}"])
    return markdown(" | ".join(["ms, median", *columns]), rows)


def main() -> None:
    """Measure, print tables, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=500, help="of each server and path")
    parser.add_argument("--over", type=Path, help="folder with another version of dflash_jax")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    paths: dict[str, Any] = {}
    for path in BODIES:
        figures: dict[str, Any] = {"bare": of_bare(path, options.requests)}
        if options.over:
            figures["before"] = of_server(path, options.requests, options.over.resolve())
        figures["now"] = of_server(path, options.requests, ROOT)
        paths[path.removeprefix("/v1/")] = figures
        print(path, "", *table(figures), "", sep="\n", flush=True)
    load = [round(x, 2) for x in os.getloadavg()]
    print(f"load average {load}")
    shared = {"requests": options.requests, "load_average": load}
    write_result(options.json, "latency", shared | {"milliseconds": paths})


if __name__ == "__main__":
    main()
