"""Cost of HTTP for one client: milliseconds per request and per chunk.

    python -m benchmarks.serve [--pairs 40] [--out benchmarks/results/serve.json]

A server with the shipped pair runs in another process, an engine with the same pair in this one;
samples are interleaved. Requests of one token measure the cost of a request, long streamed ones
the additional cost of chunks.
"""

import argparse
import http.client
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import dflash_jax as dj
from benchmarks.audit.server import served
from benchmarks.environment import write_result
from benchmarks.paired import interleaved, spread

LENGTH, LONG = 512, 128
TALK = [{"role": "user", "content": "What can you do for me?"}]


class Client:
    """One persistent connection."""

    def __init__(self, url: str):
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        self.chunks = 0  # of the last stream

    def ask(self, tokens: int, *, stream: bool) -> float:
        """Return the milliseconds from the request to the end of its answer."""
        body = {"messages": TALK, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        raw = json.dumps(body).encode()
        started = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", raw)
        answer = self._connection.getresponse().read()
        seconds = time.perf_counter() - started
        self.chunks = answer.count(b"data: ")
        return seconds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with served("--max-length", str(LENGTH)) as (_, url):
        found = measure(Client(url), options.pairs)
    print(json.dumps(found, indent=1))
    write_result(options.out, "serve", found)


def measure(client: Client, pairs: int) -> dict[str, Any]:
    """Time engine and server in turn, for a short and a long request."""
    engine = dj.load("tiny", plan=dj.Plan(max_length=LENGTH))
    engine.measures_drafting = False
    engine.warm_up()
    prompt = engine.chat_ids(TALK)

    def alone(tokens: int) -> float:
        started = time.perf_counter()
        engine.generate(prompt, max_tokens=tokens, ignore_eos=True)
        return (time.perf_counter() - started) * 1e3

    samples = interleaved(
        {
            "engine, 1 token": lambda: alone(1),
            "http, 1 token": lambda: client.ask(1, stream=False),
            f"engine, {LONG} tokens": lambda: alone(LONG),
            f"http, {LONG} tokens streamed": lambda: client.ask(LONG, stream=True),
        },
        pairs,
    )
    one, one_http, long, long_http = samples.values()
    per_request = statistics.median(one_http) - statistics.median(one)
    added = statistics.median(long_http) - statistics.median(long)
    return {
        "load_average": os.getloadavg(),
        "pairs": pairs,
        "milliseconds": {name: spread(values).to_json() for name, values in samples.items()},
        "added_ms_per_request": per_request,
        "chunks": client.chunks,
        "added_ms_per_chunk": (added - per_request) / max(client.chunks, 1),
        "added_ms_per_stream": added,
    }


if __name__ == "__main__":
    main()
