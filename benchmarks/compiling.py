"""Effect of a compilation on other requests: the longest gap in a stream.

    python -m benchmarks.compiling [--warm common] [--out FILE.json]

`dflash-jax serve` starts with an empty compilation cache. One client streams greedy answers
continuously. Another requests log-probabilities and then structured output, each for the first
time, streamed and not. Gaps are those of the first client.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "What can you do for me?"}]
PLAIN = {"messages": TALK, "max_tokens": 200, "stream": True, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
SHORT = {"messages": TALK, "max_tokens": 16}
FIRST = {
    "logprobs": SHORT | {"logprobs": True},
    "response_format": SHORT | {"response_format": FORMAT},
}
LONGEST_WAIT = 600.0  # seconds


class Neighbour:
    """Streams answers continuously and records the time of each piece."""

    def __init__(self, url: str):
        self._url, self._over = url, threading.Event()
        self.gaps: list[tuple[float, float]] = []  # end and duration in seconds
        self.texts: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=LONGEST_WAIT) as client:
            while not self._over.is_set():
                text, before = "", time.perf_counter()
                with client.stream("POST", self._url + CHAT, json=PLAIN) as answer:
                    for line in answer.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = time.perf_counter()
                        self.gaps.append((now, now - before))
                        before = now
                        choices = json.loads(line[6:])["choices"]
                        text += choices[0]["delta"].get("content") or "" if choices else ""
                self.texts.add(text)

    def longest(self, since: float) -> float:
        """Return the longest gap in seconds that ended after `since`."""
        return max((gap for ended, gap in self.gaps if ended > since), default=float("inf"))

    def stop(self) -> None:
        self._over.set()
        self._thread.join(LONGEST_WAIT)


def measure(url: str) -> dict[str, Any]:
    """Measure gaps of a stream alone, and next to requests that need other programs."""
    found: dict[str, Any] = {}
    neighbour = Neighbour(url)
    time.sleep(3)
    started = time.perf_counter()
    time.sleep(5)
    found["alone"] = {"longest_gap_s": neighbour.longest(started)}
    for name, body in FIRST.items():
        for stream in (True, False):
            started = time.perf_counter()
            answer = ask(url, body | {"stream": stream})
            entry = answer | {"longest_gap_s": neighbour.longest(started)}
            found[f"{name}{', streamed' if stream else ''}"] = entry
    neighbour.stop()
    found["neighbour_texts"] = len(neighbour.texts)
    return found


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request; return its answer and the longest time without a byte."""
    started = last = time.perf_counter()
    silence, comments = 0.0, 0
    with (
        httpx.Client(timeout=LONGEST_WAIT) as client,
        client.stream("POST", url + CHAT, json=body) as answer,
    ):
        for line in answer.iter_lines():
            now = time.perf_counter()
            silence, last = max(silence, now - last), now
            comments += line.startswith(":")
    end = time.perf_counter()
    return {
        "status": answer.status_code,
        "seconds": end - started,
        "longest_silence_s": max(silence, end - last),
        "comments": comments,
        "retry_after": answer.headers.get("retry-after"),
    }


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start a server with an empty cache; yield its URL and start-up time once it is ready."""
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port", "0", "--rows", "2"]
    command += ["--max-length", "1024", *options]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                url = process.stdout.readline().split()[-1]
                until(lambda: httpx.get(url + "/ready", timeout=LONGEST_WAIT).status_code == 200)
                yield url, {"ready_s": time.perf_counter() - started}
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            finally:
                if process.poll() is None:
                    process.kill()


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", help="the server's option")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with served(*(("--warm", options.warm) if options.warm else ())) as (url, started):
        found = started | measure(url)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found |= {"cpu_s": used.ru_utime + used.ru_stime, "load": os.getloadavg()}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
