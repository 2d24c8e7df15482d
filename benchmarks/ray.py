"""Ray on one machine with two CPUs: two workers against one, two replicas against one server.

    python -m benchmarks.ray [--pairs 3] [--json benchmarks/results/ray.json]

Needs the extra `ray`. Training prompts are answered by one and by two workers in turn; the rate is
that of the second half of the groups, after all workers have started. Then an agent of twelve turns
works with two replicas, and requests for one token go to them and to a server without Ray in turn.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.audit.server import work
from benchmarks.environment import write_result
from dflash_jax.ray import answers, app
from dflash_jax.train.recipes import recipe

PROMPTS, TURNS, REQUESTS = 1200, 12, 40
RECIPE = recipe("smoke", [f"prompts={PROMPTS}", "text_prompts=0", "new_tokens=64"])
OPTIONS = {"target": "tiny", "rows": 2, "max_length": 1024, "warm": "none", "quiet": True}


def rate(folder: Path, workers: int) -> float:
    """Return groups per second of the second half, when every worker has started."""
    import ray.data

    times: list[float] = []

    def report(line: str) -> None:
        if line.startswith("answers "):
            times.append(time.perf_counter())

    lines = [{"prompt": f"Count from {i} to {i + 20}."} for i in range(PROMPTS)]
    answers(ray.data.from_items(lines), folder, RECIPE, workers=workers, report=report)
    used = times[len(times) // 2 :]
    return (len(used) - 1) / (used[-1] - used[0])


def seconds(url: str, number: int) -> float:
    """Return the time of a request for one token."""
    message = {"role": "user", "content": f"Request {number}"}
    begin = time.perf_counter()
    body = {"messages": [message], "max_tokens": 1}
    httpx.post(url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()
    return time.perf_counter() - begin


def cached(url: str) -> int:
    """Return the prompt tokens that an agent's turns found in the prefix cache."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        return sum(turn["cached_tokens"] for turn in work(client, TURNS))


def replicas(measure: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what is measured with the URL of two replicas."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(OPTIONS | {"replicas": 2, "cpus": 0.5}), name="benchmark")
    try:
        return measure(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()


def beside_a_server(url: str) -> dict[str, Any]:
    """Return the figures of replicas at `url` and of a server without Ray."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()][:4]
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port=0", "--quiet", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        alone = process.stdout.readline().split()[-1]
        while httpx.get(alone + "/ready").status_code != 200:
            time.sleep(0.2)
        try:
            tokens = {"replicas": cached(url), "server": cached(alone)}
            pairs = [(seconds(url, i), seconds(alone, i)) for i in range(REQUESTS)][5:]
        finally:
            process.terminate()
    with_ray, without = (statistics.median(times) for times in zip(*pairs, strict=True))
    times = {"replicas": with_ray, "server": without}
    return {"cached_tokens": tokens, "seconds_of_one_token": times}


def main() -> int:
    """Measure and print, and write the results with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import ray
    except ImportError:
        parser.error("ray is not installed; pip install -e '.[ray]'")

    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20,
        logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": variables},
    )  # fmt: skip
    found: dict[str, Any] = {"ray": ray.__version__, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        pairs = [
            [rate(Path(folder) / f"{i}.{count}", count) for count in (1, 2)]
            for i in range(options.pairs)
        ]
    found["groups_per_s"] = {"one worker": [x for x, _ in pairs], "two": [x for _, x in pairs]}
    found["two_over_one"] = statistics.median(two / one for one, two in pairs)
    found |= replicas(beside_a_server)
    print(json.dumps(found, indent=2))
    write_result(options.json, "ray", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
