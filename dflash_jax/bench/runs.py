"""Benchmark backends: prompts at a given concurrency, on an engine or a server."""

import collections
import concurrent.futures
import dataclasses
import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, Protocol

from dflash_jax.bench.prompts import BenchmarkPrompt
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError


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


class BenchmarkBackend(Protocol):
    """An engine or a server that is measured."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Decoding modes: "speculative" and "plain", or "server" for other servers."""
        ...

    def run(self, prompts: Sequence[BenchmarkPrompt], concurrency: int, mode: str) -> list[Sample]:
        """Return the answers in the order of the prompts."""
        ...


class InProcess:
    """An engine in this process, given `concurrency` requests at a time."""

    def __init__(self, engine: Engine, request: RequestSettings):
        self.engine, self._settings = engine, request
        self.modes = ("speculative", "plain") if engine.graph.drafter_config else ("plain",)

    def run(self, prompts: Sequence[BenchmarkPrompt], concurrency: int, mode: str) -> list[Sample]:
        """Return the answers in the order of the prompts.

        Raises:
          RequestError: a prompt does not fit `max_length`.
        """
        engine, request = self.engine, self._settings
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
                running[at] = live, time.perf_counter()
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
        self._parts, self._settings = parts, request
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
            body |= {"return_metrics": True, "return_token_ids": True}
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
    text, first, last = "", 0.0, {}
    ids: tuple[int, ...] = ()
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RequestError(f"the server failed: {chunk['error']}")
        last |= {k: chunk[k] for k in ("usage", "metrics") if chunk.get(k)}
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            new = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            text += new
            if not first and (new or delta.get("tool_calls")):
                first = time.perf_counter() - started
            ids = tuple(choice.get("token_ids") or ids)
    seconds = time.perf_counter() - started
    usage, metrics = last.get("usage") or {}, last.get("metrics") or {}
    decoding = metrics.get("speculative_decoding") or {}
    return Sample(
        text=text,
        tokens=usage.get("completion_tokens", 0),
        prompt_tokens=usage.get("prompt_tokens", 0),
        first_token_s=first or seconds,
        seconds=seconds,
        decode_s=metrics.get("generation_time_ms", (seconds - first) * 1e3) / 1e3,
        ids=ids,
        acceptance_lengths=tuple(n + 1 for n in decoding.get("per_step_accepted", ())),
        drafts=decoding.get("num_spec_tokens", 0),
    )
