"""Runs of a benchmark, on an engine or a server at a given concurrency, and their report.

The report has figures and a plot.
"""

import collections
import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import os
import platform
import statistics
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.bench.prompts import BenchmarkPrompt
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError, install_hint
from dflash_jax.utils.progress import ShownCount
from dflash_jax.version import __version__


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer. Other servers may not report `ids` and acceptance."""

    text: str
    tokens: int
    prompt_tokens: int
    first_token_s: float
    seconds: float
    decode_s: float = 0.0
    ids: tuple[int, ...] = ()
    acceptance_lengths: tuple[int, ...] = ()
    drafts: int = 0  # drafted tokens per round


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """Settings of every request of a benchmark."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class InProcess:
    """An engine in this process, which answers `concurrency` requests at a time."""

    def __init__(self, engine: Engine, request: RequestSettings):
        self.engine = engine
        self._settings = request
        self.modes = ("speculative", "plain") if engine.graph.drafter_config else ("plain",)

    def run(self, prompts: Sequence[BenchmarkPrompt], concurrency: int, mode: str) -> list[Sample]:
        """Return the answers in the order of the prompts.

        Raises:
          RequestError: a prompt does not fit `max_length`.
        """
        engine = self.engine
        request = self._settings
        waiting = collections.deque(enumerate(prompts))
        running: dict[int, tuple[Any, float]] = {}
        samples: dict[int, Sample] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                at, entry = waiting.popleft()
                prompt = engine.chat_ids(entry.messages, tools=entry.tools or None)
                room = engine.plan.max_length - len(prompt)
                if room < 1:
                    raise RequestError(f"a prompt has {len(prompt)} tokens; raise --max-length")
                live = engine.submit(
                    prompt,
                    max_tokens=min(request.max_tokens, room),
                    temperature=request.temperature,
                    seed=request.seed,
                    speculative=mode == "speculative",
                )
                running[at] = (live, time.perf_counter())
            engine.advance()
            for at, (live, started) in list(running.items()):
                if live.done:
                    del running[at]
                    samples[at] = _sample(live.result(), time.perf_counter() - started)
        return [samples[at] for at in range(len(prompts))]


def _sample(result: Any, seconds: float) -> Sample:
    stats = result.stats
    return Sample(
        text=result.text or "",
        tokens=stats.output_tokens,
        prompt_tokens=stats.prompt_tokens,
        first_token_s=stats.first_token_s,
        seconds=seconds,
        decode_s=stats.decode_s,
        ids=tuple(result.token_ids),
        acceptance_lengths=tuple(stats.acceptance_lengths),
        drafts=len(stats.accepted_per_position),
    )


class OverHttp:
    """An OpenAI-compatible server; only ours has the modes "speculative" and "plain".

    Raises:
      RequestError: the URL is invalid, or its server does not answer like an OpenAI server.
    """

    def __init__(self, url: str, model: str, request: RequestSettings):
        parts = urllib.parse.urlsplit(url if "//" in url else "http://" + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is no http URL; give one like http://127.0.0.1:8000")
        self._parts = parts
        self._settings = request
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY") or os.environ.get("DFLASH_API_KEY") or "none"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            status, body = self._request("GET", "/v1/models")
            self._model = model or json.loads(body)["data"][0]["id"]
            ours = b"dflash_jax" in body
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise RequestError(f"{url} does not answer like an OpenAI server: {error}") from error
        if status != 200:
            raise RequestError(f"{url} answers {status}: {body[:200]!r}")
        self.modes = ("speculative", "plain") if ours else ("server",)

    def run(self, prompts: Sequence[BenchmarkPrompt], concurrency: int, mode: str) -> list[Sample]:
        """Return the answers in the order of the prompts.

        Raises:
          RequestError: the server reports an error.
        """
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda entry: self._complete(entry, mode), prompts))

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=600)

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request(method, self._base + path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _complete(self, entry: BenchmarkPrompt, mode: str) -> Sample:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": entry.messages,
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
            "seed": self._settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if entry.tools:
            body["tools"] = entry.tools
        if mode != "server":
            body |= {"timings_per_token": True, "return_token_ids": True}
        if mode == "plain":
            body["speculative"] = {"enabled": False}
        started = time.perf_counter()
        connection = self._connect()
        try:
            path = self._base + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(f"the server answers {response.status}: {response.read()[:300]}")
            return _read_stream(response, started)
        finally:
            connection.close()


def _read_stream(response: http.client.HTTPResponse, started: float) -> Sample:
    text = ""
    first = 0.0  # seconds until the first token
    last: dict[str, Any] = {}
    ids: tuple[int, ...] = ()
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RequestError(f"the server failed: {chunk['error']}")
        last |= {k: chunk[k] for k in ("usage", "timings") if chunk.get(k)}
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            new = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            text += new
            if not first and (new or delta.get("tool_calls")):
                first = time.perf_counter() - started
            ids = tuple(choice.get("token_ids") or ids)
    seconds = time.perf_counter() - started
    usage = last.get("usage") or {}
    timings = last.get("timings") or {}
    return Sample(
        text=text,
        tokens=usage.get("completion_tokens", 0),
        prompt_tokens=usage.get("prompt_tokens", 0),
        first_token_s=first or seconds,
        seconds=seconds,
        decode_s=timings.get("predicted_ms", (seconds - first) * 1e3) / 1e3,
        ids=ids,
        acceptance_lengths=tuple(n + 1 for n in timings.get("accepted_per_round", ())),
        drafts=max(timings.get("drafted_per_round", ()), default=0),
    )


@dataclasses.dataclass(frozen=True)
class BenchmarkRun:
    """One decoding mode at one concurrency, all repeats."""

    concurrency: int
    mode: str
    samples: list[Sample]  # answers of the last repeat
    walls: list[float]  # seconds per repeat

    @property
    def tokens(self) -> int:
        """Output tokens of one repeat."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def throughput(self) -> float:
        """Output tokens per second over all requests, median of the repeats."""
        return self.tokens / statistics.median(self.walls)

    @property
    def lengths(self) -> list[int]:
        """Tokens committed in each round of each request."""
        return [*itertools.chain.from_iterable(x.acceptance_lengths for x in self.samples)]

    def to_json(self) -> dict[str, Any]:
        """Return all figures; times in seconds."""
        lengths = self.lengths
        rounds = len(lengths)
        drafts = max((s.drafts for s in self.samples), default=0)
        histogram = collections.Counter(lengths)
        first = sorted(sample.first_token_s for sample in self.samples)
        speeds = [(s.tokens - 1) / s.decode_s for s in self.samples if s.decode_s > 0]
        rate = (sum(lengths) - rounds) / (rounds * drafts) if drafts else None
        return {
            "concurrency": self.concurrency,
            "lane": self.mode,  # the key is part of the public format
            "requests": len(self.samples),
            "prompt_tokens": sum(s.prompt_tokens for s in self.samples),
            "output_tokens": self.tokens,
            "wall_s": self.walls,
            "tokens_per_s": self.throughput,
            "tokens_per_s_of_one_request": statistics.median(speeds) if speeds else None,
            "first_token_s": {
                "median": statistics.median(first),
                "p95": first[min(len(first) - 1, int(0.95 * len(first)))],
            },
            "rounds": rounds,
            "acceptance_length": sum(lengths) / rounds if rounds else None,
            "draft_acceptance_rate": rate,
            "accepted_per_position": [
                len([n for n in lengths if n > place + 1]) / rounds for place in range(drafts)
            ],
            "acceptance_histogram": {str(n): histogram[n] for n in range(1, drafts + 2)},
        }


def measure(
    backend: InProcess | OverHttp,
    prompts: Sequence[BenchmarkPrompt],
    concurrencies: Sequence[int],
    repeats: int,
) -> list[BenchmarkRun]:
    """Measure every mode at every concurrency, modes in turn, after one untimed answer each."""
    for mode in backend.modes:
        backend.run(prompts[:1], 1, mode)
    runs = []
    count = ShownCount(len(concurrencies) * repeats * len(backend.modes), "runs")
    for concurrency in concurrencies:
        walls: dict[str, list[float]] = {mode: [] for mode in backend.modes}
        samples: dict[str, list[Sample]] = {}
        for _ in range(repeats):
            for mode in backend.modes:
                started = time.perf_counter()
                samples[mode] = backend.run(prompts, concurrency, mode)
                walls[mode].append(time.perf_counter() - started)
                count()
        runs += [
            BenchmarkRun(concurrency, mode, samples[mode], walls[mode]) for mode in backend.modes
        ]
    return runs


def summary(runs: Sequence[BenchmarkRun], settings: dict[str, Any]) -> dict[str, Any]:
    """Return environment, settings, runs and pairs of speculative and plain runs as JSON."""
    pairs = []
    for concurrency, (fast, slow) in _pairs(runs).items():
        same = [a.ids == b.ids for a, b in zip(fast.samples, slow.samples, strict=True)]
        pairs.append(
            {
                "concurrency": concurrency,
                "speedup": fast.throughput / slow.throughput,
                "equal_outputs": sum(same),
                "outputs": len(same),
            }
        )
    environment = {
        "dflash_jax": __version__,
        "jax": jax.__version__,
        "device": jax.local_devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    report = {"environment": environment, "settings": settings, "pairs": pairs}
    return report | {"runs": [run.to_json() for run in runs]}


def _pairs(runs: Sequence[BenchmarkRun]) -> dict[int, tuple[BenchmarkRun, BenchmarkRun]]:
    by = {(run.concurrency, run.mode): run for run in runs}
    levels = dict.fromkeys(run.concurrency for run in runs)
    return {
        c: (by[c, "speculative"], by[c, "plain"])
        for c in levels
        if (c, "speculative") in by and (c, "plain") in by
    }


def check_plot(path: Path) -> None:
    """Check before a long measurement that `plot` can write this kind of file.

    Raises:
      RequestError: matplotlib is missing or does not support the file type.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise RequestError(f"plots need matplotlib; {install_hint('plot')}") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise RequestError(f"a picture {path} cannot be drawn; its name ends in {', '.join(known)}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot throughput, acceptance by position and the histogram of acceptance lengths.

    Raises:
      RequestError: see `check_plot`; or the file cannot be written.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (speed, places, lengths) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for mode in dict.fromkeys(run["lane"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["lane"] == mode]
        levels = [run["concurrency"] for run in runs]
        values = [run["tokens_per_s"] for run in runs]
        speed.plot(levels, values, marker="o", label=mode)
    speed.set(xlabel="concurrent requests", ylabel="output tokens per second")
    speed.legend()
    drafted = next((run for run in report["runs"] if run["accepted_per_position"]), None)
    if drafted:
        shares = drafted["accepted_per_position"]
        histogram = drafted["acceptance_histogram"]
        places.bar(range(1, len(shares) + 1), shares)
        lengths.bar([int(n) for n in histogram], list(histogram.values()))
    places.set(xlabel="position of the draft", ylabel="share of rounds that accept it")
    lengths.set(xlabel="tokens per round", ylabel="rounds")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RequestError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        pyplot.close(figure)
