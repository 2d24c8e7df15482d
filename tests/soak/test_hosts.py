"""One model over two processes with two virtual CPU devices each, through HTTP."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dflash_jax as dj
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, run_server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
WAIT = 300.0
ROWS, LENGTH, REQUESTS = 4, 1024, 200
PLAN = dj.Plan(
    rows=ROWS, max_length=LENGTH, dtype="float32", prefix_cache=2**26, report_drafts=True,
    kernels="xla", steps_per_call=1,
)  # fmt: skip
OPTIONS = [
    "--rows", str(ROWS), "--max-length", str(LENGTH), "--dtype", "float32", "--kernels", "xla",
    "--prefix-cache", str(2**26), "--port", "0", "--quiet", "--compile-wait", "600",
]  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclasses.dataclass
class HostedServer:
    """A `dflash-jax serve --hosts 2` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def followers(self) -> list[int]:
        """Return the ids of the other processes."""
        return followers_of(self.process.pid)

    def wait_ready(self, seconds: float = WAIT) -> float:
        """Wait until /ready answers 200; return the seconds it took."""
        started = time.monotonic()
        while httpx.get(self.url + "/ready", timeout=10).status_code != 200:
            assert time.monotonic() - started < seconds, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)
        return time.monotonic() - started


def followers_of(first: int) -> list[int]:
    """Return the ids of the hosts that run and were started by a process or its children."""
    parents, running = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
            command = (path / "cmdline").read_bytes().split(b"\0")  # empty of an ended process
            if b"dflash_jax.server.serving_hosts" in command:
                running.append(int(path.name))

    def is_own(number: int) -> bool:
        return number == first or (number in parents and is_own(parents[number]))

    return [number for number in running if is_own(number)]


def followers_named(name: str) -> list[int]:
    """Return the ids of the processes that a name is in the command of."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


@contextlib.contextmanager
def hosted_server(folder: Path, *options: str) -> Iterator[HostedServer]:
    """Start a server over two hosts; kill what is left of it at the end."""
    command = [sys.executable, "-m", "dflash_jax", "serve", "--hosts", "2", "--mesh", "1x4"]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    variables.pop("XLA_FLAGS", None)
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *OPTIONS, *options],
            cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    others: list[int] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"listening on (\S+)", line)
        assert found, log.read_text()
        server = HostedServer(process, found[1], log)
        server.wait_ready()
        others = server.followers()
        assert len(others) == 1
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
            left = [pid for pid in others if is_alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedServer]:
    with hosted_server(tmp_path_factory.mktemp("hosts"), "--warm", "none") as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> Iterator[LiveServer]:
    """A server of this process, with the same plan on one device."""
    live = run_server(
        lambda: dj.load("tiny", plan=PLAN), ServerConfig(port=0, drain=1, compile_wait=600)
    )
    yield live
    live.stop()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 32, **fields}


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=WAIT)


def streamed(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which has to end as it should."""
    answer = post(url, path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = answer.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]" or '"error"' in lines[-1]
    return [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]


def text_of(answer: httpx.Response) -> str:
    """Return what a choice says, tool calls without their ids included."""
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content", message.get("text")), calls])


def joined(events: list[dict[str, Any]]) -> str:
    """Return the text of a stream."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(x.get("text") or x.get("delta", {}).get("content") or "" for x in choices)


def cancelled(url: str, i: int) -> str:
    """Close a stream after its first piece."""
    body = chat(f"Count to {i}.", max_tokens=400, ignore_eos=True, stream=True)
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=WAIT) as response:
        assert response.status_code == 200
        next(response.iter_raw())
    return ""


def overdue(url: str, i: int) -> str:
    body = chat(f"Count to {i}.", max_tokens=900, ignore_eos=True, timeout=0.3)
    answer = post(url, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    return ""


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOPICS = ("List three colours.", "What can you do for me?", "Write a function that adds.")
KINDS: dict[str, Callable[[str, int], str]] = {
    "chat": lambda url, i: text_of(post(url, CHAT, chat(f"{TOPICS[i % 3]} Item {i}."))),
    "stream": lambda url, i: joined(streamed(url, CHAT, chat(f"Count to {i}."))),
    "completion": lambda url, i: text_of(
        post(url, TEXT, {"prompt": f"def add_{i}(a, b):", "max_tokens": 24})
    ),
    "completion stream": lambda url, i: joined(
        streamed(url, TEXT, {"prompt": f"The number {i} is", "max_tokens": 24})
    ),
    "structured": lambda url, i: text_of(
        post(
            url,
            CHAT,
            chat(
                f"Give me colour {i} as JSON.",
                max_tokens=64,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "c", "schema": SCHEMA},
                },
            ),
        )
    ),
    "tools": lambda url, i: text_of(
        post(url, CHAT, chat(f"Check the weather in city {i}.", tools=[WEATHER], max_tokens=64))
    ),
    "sampled": lambda url, i: text_of(
        post(url, CHAT, chat(f"Tell me about {i}.", temperature=0.8, top_p=0.9, seed=i))
    ),
    "long prompt": lambda url, i: text_of(
        post(url, CHAT, chat("Say it again. " * 60 + f"Stop at {i // 20}.", max_tokens=16))
    ),
    "cancelled": cancelled,
    "deadline": overdue,
}


def mixed(url: str) -> dict[tuple[str, int], str]:
    """Send requests of all kinds, eight at a time; return the texts."""
    wanted = [(list(KINDS)[i % len(KINDS)], i) for i in range(REQUESTS)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda one: KINDS[one[0]](url, one[1]), wanted)
        return dict(zip(wanted, answers, strict=True))


def test_two_hosts_answer_as_one_process_does(server: HostedServer, alone: LiveServer) -> None:
    found = mixed(server.url)
    expected = mixed(alone.url)
    different = [key for key, text in expected.items() if found[key] != text]
    counts = collections.Counter(kind for kind, _ in different)
    print(f"{len(found)} requests, different: {dict(counts)}")
    assert not [key for key in different if key[0] != "sampled"]
    assert counts["sampled"] <= 2  # a draw may be at the edge of a rounding
    metrics = httpx.get(server.url + "/metrics", timeout=10).text
    assert re.search(r"dflash_jax:hosts\{[^}]*\} 2", metrics)
    assert alone.is_idle()


@contextlib.contextmanager
def busy(url: str) -> Iterator[list[tuple[float, str]]]:
    """Run streams and whole requests; yields the time and the code of each end.

    Each ends with its result, with an error that has a code, or by a connection that is "broken".
    """
    ends: list[tuple[float, str]] = []
    started = threading.Semaphore(0)

    def stream(i: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            return streamed_code(i)
        ends.append((time.monotonic(), "broken"))

    def streamed_code(i: int) -> None:
        body = chat(f"Stream {i}", max_tokens=900, ignore_eos=True, stream=True)
        with httpx.stream("POST", url + CHAT, json=body, timeout=WAIT) as response:
            if response.status_code != 200:
                response.read()
                ends.append((time.monotonic(), response.json()["error"]["code"]))
                return
            *_, last = (started.release() or x for x in response.iter_lines() if x)
        code = "done" if last == "data: [DONE]" else ""
        with contextlib.suppress(ValueError, KeyError):
            code = json.loads(last.removeprefix("data: "))["error"]["code"]
        ends.append((time.monotonic(), code))

    def whole(i: int) -> None:
        try:
            answer = post(url, CHAT, chat(f"Whole {i}", max_tokens=900, ignore_eos=True))
        except httpx.TransportError:
            ends.append((time.monotonic(), "broken"))
            return
        code = "done" if answer.status_code == 200 else answer.json()["error"]["code"]
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"]
        ends.append((time.monotonic(), code))

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        tasks = [pool.submit(task, i) for i in range(5) for task in (stream, whole)]
        assert started.acquire(timeout=WAIT)
        assert started.acquire(timeout=WAIT)
        yield ends
        for task in tasks:
            task.result(WAIT)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 25.0), (signal.SIGSTOP, 25.0)])
def test_a_lost_host_ends_requests_and_server_by_name(
    tmp_path: Path, number: int, seconds: float
) -> None:
    with hosted_server(tmp_path, "--warm", "none") as server:
        [follower] = server.followers()
        with busy(server.url) as ends:
            hit = time.monotonic()
            os.kill(follower, number)
            assert server.process.wait(seconds) == 1
        print(f"ended after {time.monotonic() - hit:.1f} s")
        assert {code for _, code in ends} <= {"replica_ended", "shutting_down", "broken", "done"}
        said = server.log.read_text().splitlines()[-1]
        assert said.startswith("dflash-jax: HostError: host 1 ")
        with contextlib.suppress(ProcessLookupError):
            os.kill(follower, signal.SIGKILL)  # one that is stopped ends once it goes on


def test_no_process_is_left_when_the_server_is_killed(tmp_path: Path) -> None:
    with hosted_server(tmp_path, "--warm", "none") as server:
        [follower] = server.followers()
        body = chat("Hello!", max_tokens=900, ignore_eos=True, stream=True)
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=WAIT) as response:
            pieces = response.iter_raw()
            assert next(pieces)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(pieces)
        end = time.monotonic() + 10
        while is_alive(follower):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    with hosted_server(tmp_path, "--warm", "none", "--drain", "1") as server:
        [follower] = server.followers()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) in (0, 130)
        end = time.monotonic() + 10
        while is_alive(follower):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_signal_that_reaches_all_processes_lets_requests_end(tmp_path: Path) -> None:
    with hosted_server(tmp_path, "--warm", "none", "--drain", "120") as server:
        [follower] = server.followers()
        body = chat("Hello!", max_tokens=200, ignore_eos=True, stream=True)
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=WAIT) as response:
            lines = response.iter_lines()
            assert next(lines)
            os.kill(follower, signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
