"""Attacks a server by what it stores and by its connections; prints what others noticed of each.

    python -m tests.soak.neighbours [--only WORD] [--descriptors 256] [--log FILE]

It starts the shipped pair with a limit of file descriptors. Meanwhile a neighbour asks for /health
every 10 ms, and another reads a stream. Each row has the result of an attack, the seconds it took
and the neighbours' longest waits. `large_requests.py` does the same with hostile bodies.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.soak.large_requests import Neighbour, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONVERSATIONS = "/v1/conversations"
USER = {"type": "message", "role": "user", "content": "Hello"}
ASK: dict[str, Any] = {"input": "Hello", "max_output_tokens": 4}
PATIENCE_S = 90.0  # seconds after which a connection counts as open for ever
IDLE_S = 10.0
DESCRIPTORS = 256


@dataclasses.dataclass(frozen=True)
class Target:
    """A server under attack.

    Attributes:
      size: bytes of the largest body.
      log: file with its standard error.
    """

    url: str
    process: subprocess.Popen
    size: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=600)

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(data)
        return connection


@dataclasses.dataclass(frozen=True)
class Row:
    """What an attack did."""

    name: str
    result: str
    seconds: float
    health: float  # the neighbour's longest waits, in seconds
    stream: float

    def __str__(self) -> str:
        return (
            f"{self.name:44} {self.result:38} {self.seconds:7.2f} s,"
            f" neighbour {self.health:5.2f} s, stream {self.stream:5.2f} s"
        )


# -- what is stored ------------------------------------------------------------------------------


def large_response(target: Target) -> dict[str, Any]:
    """Store a response with the largest metadata."""
    return target.post(RESPONSES, ASK | {"metadata": {"x": "y" * (target.size - 1000)}}).json()


def references(target: Target) -> str:
    answer = large_response(target)
    items = [{"type": "item_reference", "id": answer["output"][0]["id"]}] * 1000
    return str(target.post(RESPONSES, ASK | {"input": items}).status_code)


def repeated_fields(target: Target) -> str:
    body = ASK | {"metadata": {"x": [1] * min(target.size // 4, 900_000)}, "stream": True}
    return f"{len(target.post(RESPONSES, body).content) >> 20} MiB of events"


def stored_response(target: Target) -> str:
    path = f"{RESPONSES}/{large_response(target)['id']}"
    sizes = [len(httpx.get(target.url + path, timeout=600).content) for _ in range(10)]
    return f"10 times {sizes[0] >> 20} MiB"


def growing_conversation(target: Target) -> str:
    talk = target.post(CONVERSATIONS, {"items": [USER]}).json()["id"]
    items = {"items": [USER] * min(target.size // 70, 8000)}
    codes = [target.post(f"{CONVERSATIONS}/{talk}/items", items).status_code for _ in range(60)]
    whole = httpx.get(f"{target.url}{CONVERSATIONS}/{talk}/items", timeout=600)
    return f"{codes.count(200)} of 60 taken, then {codes[-1]}; {len(whole.content) >> 20} MiB"


def long_conversation(target: Target) -> str:
    long = USER | {"content": "a " * (target.size // 2 - 1000)}
    talk = target.post(CONVERSATIONS, {"items": [long]}).json()["id"]
    codes = [target.post(RESPONSES, ASK | {"conversation": talk}).status_code for _ in range(5)]
    return ", ".join(map(str, codes))


# -- answers and options ---------------------------------------------------------------------------


def many_logprobs(target: Target) -> str:
    body = {"messages": [USER], "n": 16, "max_tokens": 1000, "ignore_eos": True}
    answer = target.post(CHAT, body | {"logprobs": True, "top_logprobs": 20, "temperature": 1})
    return f"{answer.status_code}, {len(answer.content) >> 20} MiB"


def grammars_of_many_prompts(target: Target) -> str:
    schema = {"type": "object", "title": [1] * min(target.size // 4, 900_000)}
    body = {"prompt": ["a"] * 60, "max_tokens": 1, "guided_json": schema}
    return str(target.post(COMPLETIONS, body).status_code)


def unknown_fields(target: Target) -> str:
    body = {"messages": [USER], "max_tokens": 1} | {f"x{i}": 1 for i in range(target.size // 20)}
    return str(target.post(CHAT, body).status_code)


# -- connections ---------------------------------------------------------------------------------


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


CHUNKED = head("/tokenize", "Transfer-Encoding: chunked")


def chunks(count: int) -> Callable[[Target], str]:
    def send(target: Target) -> str:
        with target.connect(CHUNKED) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"1\r\n \r\n" * count + b"0\r\n\r\n")
            return connection.recv(100).split(b"\r\n")[0].decode()

    return send


def cpu_s(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def flood(data: bytes) -> Callable[[Target], str]:
    """Keep 400 connections open for ten seconds, connecting again when they are closed."""

    def send(target: Target) -> str:
        before, logged = cpu_s(target.process), target.log.stat().st_size
        answered, longest, clients = 0, 0.0, []
        end = time.monotonic() + 10
        while time.monotonic() < end:
            while len(clients) < 400:
                with contextlib.suppress(OSError):
                    clients.append(target.connect(data))
            begun = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                answered += httpx.get(target.url + "/health", timeout=5).status_code == 200
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.1)
        for client in clients:
            client.close()
        share = (cpu_s(target.process) - before) / 10
        size = target.log.stat().st_size - logged
        return f"{answered} answers, {longest:.2f} s; log {size >> 10} KiB, {share:.0%} CPU"

    return send


def lasting(first: bytes, more: bytes) -> Callable[[Target], str]:
    """Send some bytes, then one a second, until the server ends the connection."""

    def send(target: Target) -> str:
        begun = time.monotonic()
        with target.connect(first) as connection:
            connection.settimeout(1)
            while (seconds := time.monotonic() - begun) < PATIENCE_S:
                with contextlib.suppress(TimeoutError):
                    try:
                        came = connection.recv(100)
                    except ConnectionError:
                        came = b""
                    status = came.split(b"\r\n")[0].decode()
                    return f"ended after {seconds:.0f} s: {status or 'closed'}"
                with contextlib.suppress(OSError):
                    connection.sendall(more)
        return f"open after {PATIENCE_S:g} s"

    return send


def unread(target: Target) -> str:
    """Ask for a large stored response ten times, and read nothing."""
    path = f"{RESPONSES}/{large_response(target)['id']}"
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    begun = time.monotonic()
    with target.connect(request * 10) as connection:
        while (seconds := time.monotonic() - begun) < PATIENCE_S:
            time.sleep(1)
            try:
                connection.sendall(b"\r\n")
            except OSError:
                return f"ended after {seconds:.0f} s"
    return f"open after {PATIENCE_S:g} s"


def nothing(target: Target) -> str:
    """Attack nothing: other rows are compared with the waits of this one."""
    time.sleep(IDLE_S)
    return "idle"


ATTACKS: dict[str, Callable[[Target], str]] = {
    "nothing": nothing,
    "1,000 references to a large response": references,
    "a response that repeats large fields, streamed": repeated_fields,
    "a large stored response": stored_response,
    "a conversation that grows until it is full": growing_conversation,
    "a long conversation, continued": long_conversation,
    "16 answers with 20 alternatives a token": many_logprobs,
    "a large schema for 60 prompts": grammars_of_many_prompts,
    "unknown fields": unknown_fields,
    "100,000 chunks of a byte": chunks(100_000),
    "30,000 chunks of a byte": chunks(30_000),
    "400 idle connections": flood(b""),
    "400 connections with half a header": flood(b"GET / HTTP/1.1\r\nHo"),
    "400 connections with half a body": flood(head("/tokenize", "Content-Length: 9") + b"{"),
    "a silent socket": lasting(b"", b""),
    "slow headers": lasting(b"GET / HTTP/1.1\r\nx: ", b"a"),
    "a slow body": lasting(head("/tokenize", "Content-Length: 1000"), b" "),
    "a slow body in chunks": lasting(
        head("/tokenize", "Transfer-Encoding: chunked"), b"1\r\n \r\n"
    ),
    "responses that are not read": unread,
}


def attacked(target: Target, name: str) -> Row:
    """Run an attack while neighbours ask and read."""
    neighbour = Neighbour(target.url)
    time.sleep(0.3)
    begun = time.perf_counter()
    try:
        result = ATTACKS[name](target)
    except httpx.HTTPError as error:
        result = repr(error)[:38]
    seconds = time.perf_counter() - begun
    neighbour.end()
    return Row(name, result, seconds, neighbour.health, neighbour.stream)


def ended(target: Target, number: signal.Signals) -> Row:
    """Send a signal while a long stream runs, to a server without time to drain."""
    body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16}
    begun, last = time.perf_counter(), ""
    with httpx.stream("POST", target.url + COMPLETIONS, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        target.process.send_signal(number)
        with contextlib.suppress(httpx.HTTPError):
            for line in lines:
                last = line if line.startswith("data: {") else last
    code = target.process.wait(60)
    told = json.loads(last.removeprefix("data: ") or "{}")
    said = told.get("error", {}).get("code") or told["choices"][0]["finish_reason"]
    result = f"the stream ends with {said}, exit code {code}"
    return Row(f"{number.name} during a stream", result, time.perf_counter() - begun, 0, 0)


@contextlib.contextmanager
def target_server(descriptors: int, log: Path, *options: str) -> Iterator[Target]:
    """Start a server with a limit of file descriptors."""
    with served(*options, descriptors=descriptors, log=log) as (process, url):
        size = httpx.get(url + "/props").json()["limits"]["max_body"] - 10_000
        yield Target(url, process, size, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    parser.add_argument("--descriptors", type=int, default=DESCRIPTORS)
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "log"
        with target_server(options.descriptors, log) as target:
            for name in ATTACKS:
                if options.only in name:
                    print(attacked(target, name), flush=True)
        if options.only in signal.SIGTERM.name:
            with target_server(options.descriptors, log, "--drain", "0") as target:
                print(ended(target, signal.SIGTERM), flush=True)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"{sum('Traceback' in line for line in lines)} tracebacks in the log")


if __name__ == "__main__":
    main()
