"""Sends hostile bodies to a server, and reports how long its neighbours waited.

    python tests/soak/large_requests.py [--url http://127.0.0.1:8000] [--rounds 2]

Without --url it starts the shipped pair. Meanwhile a neighbour asks for /health every 10 ms, and
another reads a stream. Each line has the answer's status, the seconds it took, the neighbours'
longest waits, and, for a server started here, the resident memory before and after.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from dflash_jax.server.conversation import MOST_ARGUMENTS
from dflash_jax.server.protocol import MOST_VALUES

MESSAGE = {"role": "user", "content": ""}
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def text(value: str, **more: object) -> bytes:
    return json.dumps({"messages": [MESSAGE | {"content": value}], "max_tokens": 4} | more).encode()


def messages(*repeated: dict[str, object], count: int, name: str = "messages") -> bytes:
    inner = ",".join(json.dumps(message) for message in repeated)
    return b'{"max_tokens":4,"%s":[%s]}' % (name.encode(), ",".join([inner] * count).encode())


Case = tuple[str, str, Callable[[], bytes]]


def cases(size: int) -> Iterator[Case]:
    """Names, paths and bodies of about so many bytes."""
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
    yield "one letter", "/v1/completions", lambda: json.dumps({"prompt": letters}).encode()
    yield "one letter", RESPONSES, lambda: json.dumps({"input": letters}).encode()
    yield "one letter", ANTHROPIC, lambda: text(letters)
    yield "one letter", ANTHROPIC + "/count_tokens", lambda: text(letters)
    yield "one letter", "/tokenize", lambda: json.dumps({"content": letters}).encode()
    pieces = {"content": "a" * min(80_000, size), "with_pieces": True}
    yield "pieces of 80,000 letters", "/tokenize", lambda: json.dumps(pieces).encode()
    yield "ids", "/detokenize", lambda: ids(b'{"tokens":')
    yield "ids", "/v1/completions", lambda: ids(b'{"prompt":')
    yield "stop ids", CHAT, lambda: ids(text("a")[:-1] + b',"stop_token_ids":')
    yield (
        "ids that are allowed",
        "/v1/completions",
        lambda: b'{"prompt":[%s1]}' % (b"1," * min(size // 2, MOST_VALUES - 10)),
    )
    yield "empty messages", CHAT, lambda: messages(MESSAGE, count=size // 60)
    yield "pairs", CHAT, lambda: messages(*pair, count=size // 600)
    yield "4,000 pairs", CHAT, lambda: messages(*pair, count=min(4_000, size // 80))
    system = {"role": "system", "content": "a" * 3700}
    yield "system messages", CHAT, lambda: messages(system, count=size // 3750)
    yield "items", RESPONSES, lambda: messages(MESSAGE, count=size // 60, name="input")
    yield "empty messages", ANTHROPIC, lambda: messages(MESSAGE, count=size // 60)
    thoughts = {"role": "assistant", "content": [thought] * (size // 200)}
    yield "thoughts", ANTHROPIC, lambda: messages(thoughts, count=1)
    parts = {"role": "user", "content": [part] * (size // 200)}
    yield "parts", CHAT, lambda: messages(parts, count=1)
    yield "calls", CHAT, lambda: calls(size // 500, "{}")
    yield "arguments", CHAT, lambda: calls(1, numbers)
    allowed = '{"a":[' + "1," * min(size // 2 - 20, MOST_ARGUMENTS - 10) + "1]}"
    yield "arguments that are allowed", CHAT, lambda: calls(1, allowed)
    yield "tools", CHAT, lambda: text("a", tools=[tool] * (size // 300))
    search = [{"type": "web_search"}] * (size // 300)
    yield "tools", RESPONSES, lambda: json.dumps({"input": "a", "tools": search}).encode()
    yield "a long tool", CHAT, lambda: text("a", tools=[long])
    yield "a long tool, required", CHAT, lambda: text("a", tools=[long], tool_choice="required")
    schema = {"type": "json_object", "schema": {"title": letters}}
    yield "a long schema", CHAT, lambda: text("a", response_format=schema)
    yield "lists", CHAT, lambda: b'{"messages":[%s[]]}' % (b"[]," * (size // 3))
    keys = b"".join(b'"%x":1,' % i for i in range(size // 13))
    yield "keys", CHAT, lambda: b'{"metadata":{%s"x":1},"messages":[]}' % keys
    yield "escapes", CHAT, lambda: text("\n[" * (size // 3))
    yield "texts", CHAT, lambda: strings('"",', min(size // 3, MOST_VALUES - 10))
    yield "escaped quotes", CHAT, lambda: strings(json.dumps('"' * 100) + ",", size // 203)
    yield "deep lists", CHAT, lambda: b'{"messages":' + b"[" * size
    for name, structure in structures():
        yield name, CHAT, lambda structure=structure: text("a", **structure)


def structures() -> Iterator[tuple[str, dict[str, object]]]:
    """Fields of requests whose structure is hostile."""

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


class Neighbour:
    """Asks for /health and reads a stream, in two threads, and knows the longest waits."""

    def __init__(self, url: str):
        self._url, self._ended = url, False
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
            with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=600) as got:
                last = time.perf_counter()
                for _ in got.iter_lines():
                    now = time.perf_counter()
                    self.stream, last = max(self.stream, now - last), now
                    if self._ended:
                        break

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a case cost."""

    path: str
    name: str
    status: int  # 0 where no answer came
    text: str
    seconds: float
    health: float  # the neighbour's longest waits, in seconds
    stream: float
    memory: tuple[int, int]  # resident MB before and after

    @property
    def label(self) -> str:
        return f"{self.path} {self.name}"

    def __str__(self) -> str:
        return (
            f"{self.path:26} {self.name:26} {self.status} {self.seconds:6.2f} s, neighbour"
            f" {self.health:5.2f} s, stream {self.stream:5.2f} s, memory"
            f" {self.memory[0]} to {self.memory[1]} MB\n    {self.text}"
        )


def memory(process: subprocess.Popen | None, field: str = "VmRSS") -> int:
    """A field of the process's memory in MB; 0 if unknown."""
    path = Path(f"/proc/{process.pid}/status") if process else Path("/nonexistent")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(x.split()[1]) // 1024 for x in lines if x.startswith(field)), 0)


def idle(url: str, seconds: float = 3.0) -> Finding:
    """What a neighbour waits while nothing else happens."""
    neighbour = Neighbour(url)
    time.sleep(seconds)
    neighbour.end()
    return Finding("", "idle", 200, "", seconds, neighbour.health, neighbour.stream, (0, 0))


def attack(
    url: str, process: subprocess.Popen | None = None, size: int | None = None, chosen: str = ""
) -> Iterator[Finding]:
    """Send every case whose path and name contain `chosen`.

    Args:
      size: bytes of the bodies; by default as many as the server reads.
    """
    size = size or httpx.get(url + "/props").json()["limits"]["max_body"] - 10_000
    for name, path, make in cases(size):
        if chosen not in f"{path} {name}":
            continue
        body = make()
        before, neighbour = memory(process), Neighbour(url)
        time.sleep(0.3)
        begun = time.perf_counter()
        try:
            answer = httpx.post(url + path, content=body, timeout=600)
            found, told = answer.status_code, answer.text[:160]
        except httpx.HTTPError as error:
            found, told = 0, repr(error)
        seconds = time.perf_counter() - begun
        neighbour.end()
        after = memory(process)
        waits = neighbour.health, neighbour.stream
        yield Finding(path, name, found, told, seconds, *waits, (before, after))


@contextlib.contextmanager
def served(
    *options: str, descriptors: int | None = None, log: Path | None = None
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The shipped pair, served in a process of its own with every program compiled; its URL.

    Args:
      descriptors: limit of its file descriptors.
      log: file to which its standard error is appended.
    """
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port", "0", "--quiet"]
    command += ["--rows", "4", "--warm", "all", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with (
        (log or Path(os.devnull)).open("a") as err,
        subprocess.Popen(command, stderr=err, **pipes) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            while httpx.get(url + "/ready", timeout=60).status_code != 200:
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
            yield process, url
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server; default: start one with the shipped pair")
    parser.add_argument("--only", default="", help="cases whose path and name contain this")
    parser.add_argument("--rounds", type=int, default=1, help="how often to send every case")
    parser.add_argument("--size", type=int, help="bytes of a body; default: what the server reads")
    parser.add_argument("--max-body", help="of the server that is started")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        process, url = None, options.url
        if url is None:
            more = ["--max-body", options.max_body] if options.max_body else []
            process, url = stack.enter_context(served(*more))
        print(idle(url))
        for _ in range(options.rounds):
            for finding in attack(url, process, options.size, options.only):
                print(finding, flush=True)
            time.sleep(2)  # then memory is given back
            print(f"memory {memory(process)} MB, at most {memory(process, 'VmHWM')} MB")


if __name__ == "__main__":
    main()
