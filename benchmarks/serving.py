"""Servers beside each other under the same traffic: streamed chats of 1, 4, 8 and 16 clients.

    python -m benchmarks.serving ours=http://127.0.0.1:8080 other=http://127.0.0.1:8081
    python -m benchmarks.serving --json OUT \\
        'ours=dflash-jax serve --target smollm2 --rows 8 --port {port}' \\
        'llama.cpp=PYTHON -P PREBUILT FILE.gguf 2 16384 --rows 8 --port {port}'

PREBUILT is benchmarks/llama_cpp/prebuilt.py, PYTHON that of an environment with `pip install
xllamacpp`.

A side is an address, or a command that starts a server. Every client sends one request after the
other: the same long system prompt, a note of its own, a greedy answer. All sides get the same
texts, in turn, the same number of times; the texts of each round are new, so that only the system
prompt can be in a cache.

A side that is a command is started twice. The first time it runs alone and gets the traffic right
after it is ready ("first minute"). Then all sides run beside each other, are left alone until none
of them computes any more, and get the traffic in turn ("later"); a long prompt comes between short
streams at the end. CPU seconds and memory are those of the processes that a command started, and
are known on Linux.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import processes
from benchmarks.environment import write_result
from benchmarks.paired import markdown

WORDS = re.findall(
    r"\w+",
    "the server answers requests about code files tests errors logs memory speed cache tokens users"
    " keys limits models data rows queue and network while other people read write plan ship fix"
    " review merge build deploy watch",
)
SYSTEM_WORDS = 270
NOTE_WORDS = (40, 80, 150, 250)
LONG_WORDS = 1400
PATIENCE = 900.0  # seconds in which a server has to start, to end its own work, or to answer
IDLE = 0.05  # cores that an idle server may take, for SETTLED seconds
SETTLED = 5.0
PAUSE = 3.0  # seconds of short streams before the long prompt


def words(rng: random.Random, count: int) -> str:
    """Return random words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


SYSTEM = f"You are a careful assistant. {words(random.Random(7), SYSTEM_WORDS)}"


@dataclasses.dataclass
class Answer:
    """When the pieces of a streamed answer came, in seconds from its request.

    Attributes:
      tokens: number of tokens of the answer, as the server counted them.
    """

    pieces: list[float]
    tokens: int

    @property
    def token_s(self) -> float:
        """Seconds a token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.tokens - 1, 1)


class Side:
    """A server at an address.

    Args:
      name: the side's name in tables.
      address: the server's address, without a path.
      process: the process that was started for it, if any.
    """

    def __init__(self, name: str, address: str, process: subprocess.Popen | None = None):
        self.name = name
        self.address = address.rstrip("/")
        self.process = process
        self._client = httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=64))
        self._model = ""

    async def ready(self) -> float:
        """Wait until a request for one token is answered; return the seconds it took."""
        started = time.perf_counter()
        while True:
            with contextlib.suppress(httpx.TransportError, KeyError, IndexError):
                response = await self._client.get(f"{self.address}/v1/models")
                if response.status_code == 200:
                    self._model = response.json()["data"][0]["id"]
                    await self.ask([{"role": "user", "content": "Hi"}], 1)
                    return time.perf_counter() - started
            if self.process and self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit code {self.process.returncode}")
            if time.perf_counter() - started > PATIENCE:
                raise SystemExit(f"{self.name} does not answer at {self.address}")
            await asyncio.sleep(0.2)

    async def ask(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        """Send a chat and read its stream.

        Raises:
          SystemExit: the server refused it, or sent an error.
        """
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        pieces = []
        tokens = 0
        started = time.perf_counter()
        url = f"{self.address}/v1/chat/completions"
        async with self._client.stream("POST", url, json=body) as response:
            if response.status_code == 503:  # it is not ready
                raise httpx.ConnectError("503")
            if response.status_code != 200:
                text = (await response.aread())[:300].decode(errors="replace")
                raise SystemExit(f"{self.name} answered with {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                chunk = json.loads(line[5:])
                if chunk.get("error"):
                    raise SystemExit(f"{self.name} failed: {chunk['error']}")
                delta = (chunk.get("choices") or [{}])[0].get("delta") or {}
                if delta.get("content") or delta.get("reasoning_content"):
                    pieces.append(time.perf_counter() - started)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        end = time.perf_counter() - started
        return Answer(pieces or [end], tokens or len(pieces))

    async def idle(self) -> float:
        """Wait until the server computes nothing of its own; return the seconds it took."""
        started = last = time.perf_counter()
        if not self.process or not processes.process_ids(self.process.pid):
            return 0.0
        before = self.cpu_s
        while time.perf_counter() - started < PATIENCE:
            await asyncio.sleep(SETTLED)
            now = time.perf_counter()
            spent = self.cpu_s
            if spent - before < IDLE * (now - last):
                return last - started
            before = spent
            last = now
        raise SystemExit(f"{self.name} computes without requests for {PATIENCE:.0f} s")

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the side's processes; 0 if they are not known."""
        return processes.cpu_s(self.process.pid) if self.process else 0.0

    @property
    def memory_mb(self) -> dict[str, float]:
        """Resident memory of the side's processes now, and at most."""
        return processes.memory_mb(self.process.pid) if self.process else {}

    async def close(self) -> None:
        """Close the connections, and end the process."""
        await self._client.aclose()
        if self.process:
            processes.end(self.process)


def start(name: str, target: str) -> Side:
    """Return a side of an address, or of a command that is started."""
    if target.startswith(("http://", "https://")):
        return Side(name, target)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in shlex.split(target)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Side(name, f"http://127.0.0.1:{port}", process)


async def traffic(side: Side, clients: int, max_tokens: int, seed: str) -> dict[str, Any]:
    """Return the figures of as many clients, each of which sends two requests."""
    rng = random.Random(seed)
    notes = [words(rng, rng.choice(NOTE_WORDS)) for _ in range(2 * clients)]
    waiting: Iterator[str] = iter(notes)
    answers: list[Answer] = []

    async def client() -> None:
        for note in waiting:
            text = f"Note: {note}. Write a long story about this note."
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            answers.append(await side.ask(messages, max_tokens))

    cpu_s = side.cpu_s
    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - started
    tokens = sum(x.tokens for x in answers)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_token_s": [x.pieces[0] for x in answers],
        "token_ms": [1e3 * x.token_s for x in answers],
        "cpu_s": side.cpu_s - cpu_s,
    }


async def stall(side: Side, max_tokens: int, seed: str) -> dict[str, float]:
    """Return how long short streams wait while a long prompt is read, and it for its answer."""
    rng = random.Random(seed)
    long = f"Read this: {words(rng, LONG_WORDS)}. Summarise it."
    texts = [f"Write a long story about {words(rng, 12)}." for _ in range(3)]
    begun = time.perf_counter()

    def short(text: str) -> Any:
        return side.ask([{"role": "user", "content": text}], 6 * max_tokens)

    streams = [asyncio.create_task(short(text)) for text in texts]
    await asyncio.sleep(PAUSE)
    sent = time.perf_counter() - begun
    last = await side.ask([{"role": "user", "content": long}], 8)
    gaps = [0.0]
    for stream in await asyncio.gather(*streams):
        gaps += [b - a for a, b in itertools.pairwise(stream.pieces) if b > sent]
    return {"first_token_s": last.pieces[0], "longest_wait_s": max(gaps)}


def joined(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians and 95th percentiles of the figures of several rounds."""

    def percentile(name: str, share: float) -> float:
        numbers = sorted(x for sample in samples for x in sample[name])
        return numbers[min(int(share * len(numbers)), len(numbers) - 1)]

    return {
        "tokens": sum(sample["tokens"] for sample in samples),
        "tokens_per_s": statistics.median(sample["tokens_per_s"] for sample in samples),
        "first_token_s": percentile("first_token_s", 0.5),
        "first_token_s_p95": percentile("first_token_s", 0.95),
        "token_ms": percentile("token_ms", 0.5),
        "token_ms_p95": percentile("token_ms", 0.95),
        "cpu_s": sum(sample["cpu_s"] for sample in samples),
    }


Figures = dict[str, dict[str, Any]]  # the figures of each side, by its name


async def first_minute(targets: dict[str, str], options: argparse.Namespace) -> Figures:
    """Return the figures of each side that is started, alone, right after it is ready."""
    by_side: Figures = {}
    for name, target in targets.items():
        side = start(name, target)
        if side.process is None:
            await side.close()
            continue
        try:
            ready_s = await side.ready()
            figures = {}
            for clients in options.clients:
                sample = await traffic(side, clients, options.tokens, f"first {clients}")
                figures[str(clients)] = joined([sample])
                _say(name, "first minute", clients, figures[str(clients)])
            by_side[name] = {"ready_s": ready_s, "clients": figures, "idle_s": await side.idle()}
            by_side[name]["cpu_s"] = side.cpu_s
        finally:
            await side.close()
    return by_side


async def later(targets: dict[str, str], options: argparse.Namespace) -> Figures:
    """Return the figures of all sides, which run beside each other and are asked in turn."""
    sides = [start(name, target) for name, target in targets.items()]
    by_side: Figures = {side.name: {"clients": {}} for side in sides}
    try:
        for side in sides:
            by_side[side.name]["ready_s"] = await side.ready()
        for side in sides:
            by_side[side.name]["idle_s"] = await side.idle()
        for clients in options.clients:
            samples: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for number in range(options.rounds):
                for side in sides:
                    seed = f"{clients} {number}"
                    samples[side.name].append(await traffic(side, clients, options.tokens, seed))
            for name, of_side in samples.items():
                by_side[name]["clients"][str(clients)] = joined(of_side)
                _say(name, "later", clients, joined(of_side))
        for side in sides:
            by_side[side.name]["long_prompt"] = await stall(side, options.tokens, "long")
            by_side[side.name]["memory_mb"] = side.memory_mb
    finally:
        for side in sides:
            await side.close()
    return by_side


def _say(name: str, when: str, clients: int, figures: dict[str, float]) -> None:
    speed = figures["tokens_per_s"]
    token = figures["token_ms"]
    print(f"{name}, {when}, {clients} clients: {speed:.1f} tokens/s, {token:.1f} ms a token")
    sys.stdout.flush()


def table(phases: dict[str, Figures]) -> list[str]:
    """Return the figures of all sides in Markdown, in a cell those of the sides in their order.

    A time is its median, and in brackets its 95th percentile. The ratio is that of the first two
    sides' tokens per second.
    """
    rows = []
    for when, sides in phases.items():
        for clients in next(iter(sides.values()))["clients"]:
            figures = [of_side["clients"][clients] for of_side in sides.values()]
            speeds = [one["tokens_per_s"] for one in figures]
            row = [
                when,
                clients,
                " / ".join(f"{speed:.1f}" for speed in speeds),
                f"{speeds[0] / speeds[1]:.2f}" if len(speeds) > 1 else "",
                _times(figures, "token_ms", 1),
                _times(figures, "first_token_s", 2),
                " / ".join(f"{one['cpu_s']:.1f}" for one in figures),
            ]
            rows.append(row)
    names = " / ".join(phases["later"])
    headings = f"when | clients | answer tokens/s, {names} | ratio | ms a token (p95)"
    return markdown(f"{headings} | first token, s (p95) | CPU s", rows)


def _times(figures: Sequence[dict[str, float]], name: str, digits: int) -> str:
    """Return the median of every side, with its 95th percentile in brackets."""
    return " / ".join(
        f"{one[name]:.{digits}f} ({one[f'{name}_p95']:.{digits}f})" for one in figures
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sides", nargs="+", metavar="NAME=ADDRESS|COMMAND")
    parser.add_argument("--clients", default="1,4,8,16", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of clients, later")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument(
        "--skip-first-minute", action="store_true", help="measure idle servers only"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    targets = dict(side.partition("=")[::2] for side in options.sides)
    for name, target in targets.items():
        command = not target.startswith(("http://", "https://"))
        if not target or (command and "{port}" not in target):
            parser.error(f"{name!r} is no NAME=ADDRESS, or NAME=COMMAND with {{port}} in it")
    try:
        options.clients = [int(number) for number in options.clients.split(",")]
    except ValueError:
        parser.error(f"--clients is {options.clients!r}; expected numbers, such as 1,4,8")
    phases = {}
    if not options.skip_first_minute:
        phases["first minute"] = asyncio.run(first_minute(targets, options))
    phases["later"] = asyncio.run(later(targets, options))
    print("", *table(phases), "", sep="\n")
    load = [round(x, 2) for x in os.getloadavg()]
    shown = {"sides": targets, "rounds": options.rounds, "max_tokens": options.tokens}
    write_result(options.json, "serving", shown | {"load_average": load, "figures": phases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
