"""Attacks on a server, by bodies, by what it stores and by connections; and what others noticed.

`python -m benchmarks.audit attack` starts the shipped pair with a limit of file descriptors.
Meanwhile a neighbour asks for /health every 10 ms, and another reads a stream. Each row has the
result of an attack, the seconds it took, the neighbours' longest waits, and the resident memory
before and after.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.audit.serve import (
    CHAT,
    COMPLETIONS,
    CONVERSATIONS,
    MESSAGES,
    RESPONSES,
    STORED,
    served,
)
from benchmarks.processes import cpu_s, memory_mb
from dflash_jax.server.conversation import MOST_ARGUMENTS
from dflash_jax.server.protocol import MOST_VALUES

MESSAGE = {"role": "user", "content": ""}
USER = {"type": "message", "role": "user", "content": "Hello"}
PATIENCE_S = 90.0  # seconds after which a connection counts as open for ever
IDLE_S = 10.0
DESCRIPTORS = 256
CONNECTIONS = 400  # connections of a flood


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

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=600)

    def connect(self, data: bytes = b"") -> socket.socket:
        url = httpx.URL(self.url)
        connection = socket.create_connection((url.host, url.port or 80), timeout=60)
        connection.sendall(data)
        return connection


Act = Callable[[Target], str | httpx.Response]


@dataclasses.dataclass(frozen=True)
class Row:
    """The effect of an attack.

    Attributes:
      status: status of the only answer; 0 if none came, None if the attack is no single request.
      health, stream: the neighbours' longest waits, in seconds.
      memory: resident MB before and after.
    """

    name: str
    result: str
    status: int | None
    seconds: float
    health: float
    stream: float
    memory: tuple[float, float] = (0.0, 0.0)

    @property
    def passed(self) -> bool:
        """Whether the server answered, or refused the request as it should."""
        if self.status is None:
            return True
        return 400 <= self.status < 500 or self.status in (200, 503)

    def __str__(self) -> str:
        return (
            f"{self.name:48} {self.result:44} {self.seconds:7.2f} s,"
            f" neighbour {self.health:5.2f} s, stream {self.stream:5.2f} s,"
            f" memory {self.memory[0]:.0f} to {self.memory[1]:.0f} MB"
        )


# -- neighbours ----------------------------------------------------------------------------------


class Neighbour:
    """Asks for /health and reads a stream, in two threads, and knows the longest waits."""

    def __init__(self, url: str):
        self._url = url
        self._ended = False
        self.health = self.stream = 0.0  # seconds for an answer; seconds between two lines
        self._threads = [threading.Thread(target=run) for run in (self._ask, self._read)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=600) as client:
            while not self._ended:
                begun = time.perf_counter()
                client.get(self._url + "/health")
                self.health = max(self.health, time.perf_counter() - begun)
                time.sleep(0.01)

    def _read(self) -> None:
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not self._ended:
            with httpx.stream("POST", self._url + COMPLETIONS, json=body, timeout=600) as got:
                last = time.perf_counter()
                for _ in got.iter_lines():
                    now = time.perf_counter()
                    self.stream = max(self.stream, now - last)
                    last = now
                    if self._ended:
                        break

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()


# -- bodies --------------------------------------------------------------------------------------


def text(value: str, fields: Mapping[str, object] | None = None) -> bytes:
    """Return the body of a chat with one message, and further fields."""
    body = {"messages": [MESSAGE | {"content": value}], "max_tokens": 4} | dict(fields or {})
    return json.dumps(body).encode()


def messages(*repeated: dict[str, object], count: int, name: str = "messages") -> bytes:
    """Return the body of a chat that repeats some messages `count` times."""
    inner = ",".join(json.dumps(message) for message in repeated)
    return b'{"max_tokens":4,"%s":[%s]}' % (name.encode(), ",".join([inner] * count).encode())


Body = tuple[str, str, Callable[[], bytes]]


def bodies(size: int) -> Iterator[Body]:
    """Yield names, paths and bodies of about so many bytes."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    pair = MESSAGE, {"role": "assistant", "content": ""}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": "y"}}}
    long = {"type": "function", "function": {"name": "f", "description": "a" * size}}
    numbers = '{"a":[' + "1," * (size // 2 - 20) + "1]}"
    part = {"type": "text", "text": "a"}
    thought = {"type": "thinking", "thinking": "a" * 120}
    letters = "a" * size

    def ids(head: bytes) -> bytes:
        return head + b"[%s1]}" % (b"1," * (size // 2))

    def calls(count: int, arguments: str) -> bytes:
        one = call | {"function": {"name": "f", "arguments": arguments}}
        return messages(MESSAGE, {"role": "assistant", "tool_calls": [one] * count}, count=1)

    def strings(value: str, count: int) -> bytes:
        return text("a")[:-1] + b',"metadata":[%s1]}' % (value.encode() * count)

    yield "one letter", CHAT, lambda: text(letters)
    yield "spaces", CHAT, lambda: text(" " * size)
    yield "one letter", COMPLETIONS, lambda: json.dumps({"prompt": letters}).encode()
    yield "one letter", RESPONSES, lambda: json.dumps({"input": letters}).encode()
    yield "one letter", MESSAGES, lambda: text(letters)
    yield "one letter", f"{MESSAGES}/count_tokens", lambda: text(letters)
    yield "one letter", "/tokenize", lambda: json.dumps({"content": letters}).encode()
    pieces = {"content": "a" * min(80_000, size), "with_pieces": True}
    yield "pieces of 80,000 letters", "/tokenize", lambda: json.dumps(pieces).encode()
    yield "ids", "/detokenize", lambda: ids(b'{"tokens":')
    yield "ids", COMPLETIONS, lambda: ids(b'{"prompt":')
    yield "stop ids", CHAT, lambda: ids(text("a")[:-1] + b',"stop_token_ids":')
    yield (
        "ids that are allowed",
        COMPLETIONS,
        lambda: b'{"prompt":[%s1]}' % (b"1," * min(size // 2, MOST_VALUES - 10)),
    )
    yield "empty messages", CHAT, lambda: messages(MESSAGE, count=size // 60)
    yield "pairs", CHAT, lambda: messages(*pair, count=size // 600)
    yield "4,000 pairs", CHAT, lambda: messages(*pair, count=min(4_000, size // 80))
    system = {"role": "system", "content": "a" * 3700}
    yield "system messages", CHAT, lambda: messages(system, count=size // 3750)
    yield "items", RESPONSES, lambda: messages(MESSAGE, count=size // 60, name="input")
    yield "empty messages", MESSAGES, lambda: messages(MESSAGE, count=size // 60)
    thoughts = {"role": "assistant", "content": [thought] * (size // 200)}
    yield "thoughts", MESSAGES, lambda: messages(thoughts, count=1)
    parts = {"role": "user", "content": [part] * (size // 200)}
    yield "parts", CHAT, lambda: messages(parts, count=1)
    yield "calls", CHAT, lambda: calls(size // 500, "{}")
    yield "arguments", CHAT, lambda: calls(1, numbers)
    allowed = '{"a":[' + "1," * min(size // 2 - 20, MOST_ARGUMENTS - 10) + "1]}"
    yield "arguments that are allowed", CHAT, lambda: calls(1, allowed)
    yield "tools", CHAT, lambda: text("a", {"tools": [tool] * (size // 300)})
    search = [{"type": "web_search"}] * (size // 300)
    yield "tools", RESPONSES, lambda: json.dumps({"input": "a", "tools": search}).encode()
    yield "a long tool", CHAT, lambda: text("a", {"tools": [long]})
    required = {"tools": [long], "tool_choice": "required"}
    yield "a long tool, required", CHAT, lambda: text("a", required)
    schema = {"type": "json_object", "schema": {"title": letters}}
    yield "a long schema", CHAT, lambda: text("a", {"response_format": schema})
    yield "lists", CHAT, lambda: b'{"messages":[%s[]]}' % (b"[]," * (size // 3))
    keys = b"".join(b'"%x":1,' % i for i in range(size // 13))
    yield "keys", CHAT, lambda: b'{"metadata":{%s"x":1},"messages":[]}' % keys
    yield "escapes", CHAT, lambda: text("\n[" * (size // 3))
    yield "texts", CHAT, lambda: strings('"",', min(size // 3, MOST_VALUES - 10))
    yield "escaped quotes", CHAT, lambda: strings(json.dumps('"' * 100) + ",", size // 203)
    yield "deep lists", CHAT, lambda: b'{"messages":' + b"[" * size
    for name, structure in structures():
        yield name, CHAT, functools.partial(text, "a", structure)


def structures() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield names and fields of requests whose structure is hostile."""

    def chain(count: int, letter: str) -> str:
        lines = [f"{letter}{i}: {letter}{i + 1}" for i in range(count)]
        return "\n".join([f"start: {letter}0", *lines, f'{letter}{count}: "x"'])

    references: dict[str, object] = {
        f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)
    } | {"a3000": {"type": "integer"}}
    multiples = [{"multipleOf": 9973}, {"multipleOf": 9967}]
    yield "a chain of references", {"guided_json": {"$ref": "#/$defs/a0", "$defs": references}}
    yield "deep items", {"guided_json": '{"items":' * 2000 + "{}" + "}" * 2000}
    yield "a chain of 5,000 rules", {"guided_grammar": chain(5000, "r")}
    yield "a chain of 990 rules", {"guided_grammar": chain(990, "r")}
    yield "5,000 terminals", {"guided_grammar": chain(5000, "T")}
    yield "a large multiple", {"guided_json": {"type": "integer", "multipleOf": 1000003}}
    yield "two multiples", {"guided_json": {"type": "integer", "allOf": multiples}}
    yield (
        "doubled terminals",
        {
            "guided_grammar": "start: T0\n"
            + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
            + '\nT40: "x"'
        },
    )
    yield "nested repetitions", {"guided_regex": "((((a{1,50}){1,50}){1,50}){1,50}){1,50}"}


# -- what is stored ------------------------------------------------------------------------------


def large_response(target: Target) -> dict[str, Any]:
    """Store a response with the largest metadata."""
    return target.post(RESPONSES, STORED | {"metadata": {"x": "y" * (target.size - 1000)}}).json()


def references(target: Target) -> httpx.Response:
    answer = large_response(target)
    items = [{"type": "item_reference", "id": answer["output"][0]["id"]}] * 1000
    return target.post(RESPONSES, STORED | {"input": items})


def repeated_fields(target: Target) -> str:
    body = STORED | {"metadata": {"x": [1] * min(target.size // 4, 900_000)}, "stream": True}
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
    codes = [target.post(RESPONSES, STORED | {"conversation": talk}).status_code for _ in range(5)]
    return ", ".join(map(str, codes))


# -- answers and options ---------------------------------------------------------------------------


def many_logprobs(target: Target) -> str:
    body = {"messages": [USER], "n": 16, "max_tokens": 1000, "ignore_eos": True}
    answer = target.post(CHAT, body | {"logprobs": True, "top_logprobs": 20, "temperature": 1})
    return f"{answer.status_code}, {len(answer.content) >> 20} MiB"


def grammars_of_many_prompts(target: Target) -> httpx.Response:
    schema = {"type": "object", "title": [1] * min(target.size // 4, 900_000)}
    body = {"prompt": ["a"] * 60, "max_tokens": 1, "guided_json": schema}
    return target.post(COMPLETIONS, body)


def unknown_fields(target: Target) -> httpx.Response:
    body = {"messages": [USER], "max_tokens": 1} | {f"x{i}": 1 for i in range(target.size // 20)}
    return target.post(CHAT, body)


# -- connections ---------------------------------------------------------------------------------


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


CHUNKED = head("/tokenize", "Transfer-Encoding: chunked")


def chunks(count: int) -> Act:
    def send(target: Target) -> str:
        with target.connect(CHUNKED) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"1\r\n \r\n" * count + b"0\r\n\r\n")
            return connection.recv(100).split(b"\r\n")[0].decode()

    return send


def flood(data: bytes) -> Act:
    """Keep 400 connections open for ten seconds, connecting again when they are closed."""

    def send(target: Target) -> str:
        before = cpu_s(target.process.pid)
        logged = target.log.stat().st_size
        answered = 0
        longest = 0.0
        clients: list[socket.socket] = []
        end = time.monotonic() + 10
        while time.monotonic() < end:
            while len(clients) < CONNECTIONS:
                with contextlib.suppress(OSError):
                    clients.append(target.connect(data))
            begun = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(target.url + "/health", timeout=5).status_code == 200:
                    answered += 1
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.1)
        for client in clients:
            client.close()
        share = (cpu_s(target.process.pid) - before) / 10
        size = target.log.stat().st_size - logged
        return f"{answered} answers, {longest:.2f} s; log {size >> 10} KiB, {share:.0%} CPU"

    return send


def lasting(first: bytes, more: bytes) -> Act:
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


OTHERS: dict[str, Act] = {
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


# -- the table -----------------------------------------------------------------------------------


def attacks(size: int) -> Iterator[tuple[str, Act]]:
    """Yield the name of every attack and what it does.

    Args:
      size: bytes of the bodies.
    """
    yield from OTHERS.items()
    for name, path, make in bodies(size):
        yield f"{path} {name}", functools.partial(_send, path=path, make=make)


def _send(target: Target, *, path: str, make: Callable[[], bytes]) -> httpx.Response:
    return httpx.post(target.url + path, content=make(), timeout=600)


def attacked(target: Target, name: str, act: Act) -> Row:
    """Run an attack while neighbours ask and read."""
    before = memory_mb(target.process.pid)["resident"]
    neighbour = Neighbour(target.url)
    time.sleep(0.3)
    status: int | None = None
    begun = time.perf_counter()
    try:
        result = act(target)
    except httpx.HTTPError as error:
        result = repr(error)[:44]
        status = 0
    seconds = time.perf_counter() - begun
    neighbour.end()
    after = memory_mb(target.process.pid)["resident"]
    if isinstance(result, httpx.Response):
        status = result.status_code
        result = f"{status} {result.text[:40]}".replace("\n", " ")
    return Row(name, result, status, seconds, neighbour.health, neighbour.stream, (before, after))


def ended(target: Target, number: signal.Signals) -> Row:
    """Send a signal while a long stream runs, to a server without time to drain."""
    body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16}
    begun = time.perf_counter()
    last = ""
    with httpx.stream("POST", target.url + COMPLETIONS, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        target.process.send_signal(number)
        with contextlib.suppress(httpx.HTTPError):
            for line in lines:
                if line.startswith("data: {"):
                    last = line
    code = target.process.wait(60)
    told = json.loads(last.removeprefix("data: ") or "{}")
    said = told.get("error", {}).get("code") or told["choices"][0]["finish_reason"]
    result = f"the stream ends with {said}, exit code {code}"
    return Row(
        f"{number.name} during a stream", result, None, time.perf_counter() - begun, 0.0, 0.0
    )


@contextlib.contextmanager
def target_server(log: Path, *options: str, descriptors: int = DESCRIPTORS) -> Iterator[Target]:
    """Start the shipped pair with every program compiled, and a limit of file descriptors."""
    fixed = ("--rows", "4", "--warm", "all")
    with served(*fixed, *options, descriptors=descriptors, log=log) as server:
        size = httpx.get(f"{server.url}/props").json()["limits"]["max_body"] - 10_000
        yield Target(server.url, server.process, size, log)


def attack(words: Sequence[str]) -> int:
    """Run attacks, printing a row each; return 1 if one was not answered as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit attack",
        description="Further options are those of the server, such as --max-body 33554432.",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="attacks that are named so")
    parser.add_argument("--descriptors", type=int, default=DESCRIPTORS, help="files it may open")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options, of_server = parser.parse_known_args(words)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "log"
        with target_server(log, *of_server, descriptors=options.descriptors) as target:
            for name, act in attacks(target.size):
                if options.only in name:
                    rows.append(attacked(target, name, act))
                    print(rows[-1], flush=True)
        if options.only in signal.SIGTERM.name:
            with target_server(log, *of_server, "--drain", "0") as target:
                print(ended(target, signal.SIGTERM), flush=True)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tracebacks = len([line for line in lines if "Traceback" in line])
    print(f"{tracebacks} tracebacks in the log")
    return 1 if tracebacks or not all(row.passed for row in rows) else 0
