"""Sends bodies of the largest size to a server, and reports how long a neighbour waited.

    python tests/soak/large_requests.py [--url http://127.0.0.1:8000]

Without --url it starts the shipped pair. A neighbour asks for /health every 10 ms meanwhile; each
line has the answer's status, the seconds it took, the neighbour's longest wait, and, for a server
started here, the resident memory before and after, and its highest value so far.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

MESSAGE = {"role": "user", "content": ""}
SIZE = 30_000_000
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def text(value: str, **more: object) -> bytes:
    return json.dumps({"messages": [MESSAGE | {"content": value}], "max_tokens": 4} | more).encode()


def messages(*repeated: dict[str, object], count: int, name: str = "messages") -> bytes:
    inner = ",".join(json.dumps(message) for message in repeated)
    return b'{"max_tokens":4,"%s":[%s]}' % (name.encode(), ",".join([inner] * count).encode())


def cases() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    pair = MESSAGE, {"role": "assistant", "content": ""}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": "y"}}}
    long = {"type": "function", "function": {"name": "f", "description": "a" * SIZE}}
    numbers = '{"a":[' + "1," * (SIZE // 2 - 20) + "1]}"
    arguments = call | {"function": {"name": "f", "arguments": numbers}}
    yield "30 million a", CHAT, lambda: text("a" * SIZE)
    yield "30 million spaces", CHAT, lambda: text(" " * SIZE)
    yield "30 million a", "/v1/completions", lambda: json.dumps({"prompt": "a" * SIZE}).encode()
    yield "30 million a", RESPONSES, lambda: json.dumps({"input": "a" * SIZE}).encode()
    yield "30 million a", ANTHROPIC, lambda: text("a" * SIZE)
    yield "30 million a", ANTHROPIC + "/count_tokens", lambda: text("a" * SIZE)
    yield "30 million a", "/tokenize", lambda: json.dumps({"content": "a" * SIZE}).encode()
    yield (
        "80,000 a",
        "/tokenize",
        lambda: json.dumps({"content": "a" * 80_000, "with_pieces": True}).encode(),
    )
    yield "15 million ids", "/detokenize", lambda: b'{"tokens":[%s1]}' % (b"1," * (SIZE // 2))
    yield "15 million ids", "/v1/completions", lambda: b'{"prompt":[%s1]}' % (b"1," * (SIZE // 2))
    yield (
        "15 million stop ids",
        CHAT,
        lambda: text("a")[:-1] + b',"stop_token_ids":[%s1]}' % (b"1," * (SIZE // 2)),
    )
    yield "500,000 messages", CHAT, lambda: messages(MESSAGE, count=500_000)
    yield "50,000 pairs", CHAT, lambda: messages(*pair, count=50_000)
    yield "4,000 pairs", CHAT, lambda: messages(*pair, count=4_000)
    yield (
        "8,000 system messages of 3,700",
        CHAT,
        lambda: messages({"role": "system", "content": "a" * 3700}, count=8_000),
    )
    yield "500,000 items", RESPONSES, lambda: messages(MESSAGE, count=500_000, name="input")
    yield "500,000 messages", ANTHROPIC, lambda: messages(MESSAGE, count=500_000)
    yield (
        "150,000 thoughts",
        ANTHROPIC,
        lambda: messages(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "a" * 120}] * 150_000,
            },
            count=1,
        ),
    )
    yield (
        "150,000 parts",
        CHAT,
        lambda: messages(
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 150_000}, count=1
        ),
    )
    yield (
        "60,000 calls",
        CHAT,
        lambda: messages(MESSAGE, {"role": "assistant", "tool_calls": [call] * 60_000}, count=1),
    )
    yield (
        "arguments of 30 MB",
        CHAT,
        lambda: messages(MESSAGE, {"role": "assistant", "tool_calls": [arguments]}, count=1),
    )
    yield "100,000 tools", CHAT, lambda: text("a", tools=[tool] * 100_000)
    yield (
        "100,000 tools",
        RESPONSES,
        lambda: json.dumps({"input": "a", "tools": [{"type": "web_search"}] * 100_000}).encode(),
    )
    yield "a tool of 30 MB", CHAT, lambda: text("a", tools=[long])
    yield "a tool of 30 MB, required", CHAT, lambda: text("a", tools=[long], tool_choice="required")
    yield (
        "a schema of 30 MB",
        CHAT,
        lambda: text("a", response_format={"type": "json_object", "schema": {"title": "a" * SIZE}}),
    )
    yield "10 million lists", CHAT, lambda: b'{"messages":[%s[]]}' % (b"[]," * (SIZE // 3))
    yield (
        "3 million keys",
        CHAT,
        lambda: (
            b'{"metadata":{%s"x":1},"messages":[]}'
            % b"".join(b'"%x":1,' % i for i in range(3_000_000))
        ),
    )
    yield (
        "a text of escapes",
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"' + b"\\n[" * (SIZE // 3) + b'"}]}',
    )


class Neighbour:
    """Asks for /health in a loop, and knows its longest wait."""

    def __init__(self, url: str):
        self._url, self.longest, self._ended = url, 0.0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=600) as client:
            while not self._ended:
                begun = time.perf_counter()
                client.get(self._url + "/health")
                self.longest = max(self.longest, time.perf_counter() - begun)
                time.sleep(0.01)

    def end(self) -> float:
        self._ended = True
        self._thread.join()
        return self.longest


def memory(process: subprocess.Popen | None, field: str) -> int:
    """A field of the process's memory in MB; 0 if unknown."""
    path = Path(f"/proc/{process.pid}/status") if process else Path("/nonexistent")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(x.split()[1]) // 1024 for x in lines if x.startswith(field)), 0)


def attack(url: str, process: subprocess.Popen | None, chosen: str) -> None:
    for name, path, make in cases():
        if chosen not in f"{path} {name}":
            continue
        body = make()
        before, neighbour = memory(process, "VmRSS"), Neighbour(url)
        time.sleep(0.3)
        begun = time.perf_counter()
        try:
            answer = httpx.post(url + path, content=body, timeout=600)
            found, told = answer.status_code, answer.text[:160]
        except httpx.HTTPError as error:
            found, told = 0, repr(error)
        seconds = time.perf_counter() - begun
        print(
            f"{path:26} {name:32} {found} {seconds:6.2f} s, neighbour {neighbour.end():6.2f} s,"
            f" memory {before} to {memory(process, 'VmRSS')} (most {memory(process, 'VmHWM')}) MB"
            f"\n    {told}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server; default: start one with the shipped pair")
    parser.add_argument("--only", default="", help="cases whose path and name contain this")
    options = parser.parse_args()
    if options.url:
        attack(options.url, None, options.only)
        return
    port = "18471"
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port", port]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    if httpx.get(url + "/ready").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
            attack(url, process, options.only)
        finally:
            process.terminate()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"the server took {used.ru_utime + used.ru_stime:.1f} CPU seconds")


if __name__ == "__main__":
    main()
