"""GGUF files beside the prebuilt llama.cpp: plain decoding, prompts, starts and memory.

    python -m benchmarks.gguf_files FILE.gguf ... --peer PYTHON [--rounds 5] [--json OUT]

PYTHON is that of an environment with `pip install xllamacpp`. Both sides load the file once and
answer the same token ids in turn, greedily, with default settings. Our side is started once before,
so that the start that counts finds its compiled programs, as every start but the first does.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result
from benchmarks.paired import markdown, spread
from benchmarks.workers import Worker

OURS, THEIRS = "ours", "llama.cpp"
PROMPTS = (1, 10, 60, 580)  # tokens
CONTEXT = 2048
DECODED = 64  # tokens after the first
LEAST_ID, MOST_ID = 100, 30_000  # of the tokens of prompts, which every vocabulary has
JAX_WORKER = ("-m", "benchmarks.jax_worker")
PEER_WORKER = Path(__file__).with_name("xllamacpp_worker.py")


def request(count: int, tokens: int, seed: int) -> str:
    """Return a request of workers for `count` tokens after random ones, past end tokens."""
    draw = random.Random(f"{tokens} {seed}")
    ids = ",".join(str(draw.randrange(LEAST_ID, MOST_ID)) for _ in range(tokens))
    return f"plain {count} {ids} 0"


def memory_mb(pid: int) -> dict[str, float]:
    """Return the resident memory of a process and its peak."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    kept = dict(line.split(":", 1) for line in lines)
    names = {"resident": "VmRSS", "peak": "VmHWM"}
    return {name: int(kept[field].split()[0]) * 1024 / 1e6 for name, field in names.items()}


def start(command: Sequence[str], cores: int) -> tuple[Worker, dict[str, float]]:
    """Return a worker, and seconds until it was loaded and until its first answer to 10 tokens."""
    started = time.perf_counter()
    worker = Worker(command, cores)
    loaded = time.perf_counter() - started
    worker.ask(request(1, 10, 0))
    return worker, {"load_s": loaded, "first_answer_s": time.perf_counter() - started}


def measure(file: Path, peer: str, cores: int, rounds: int, python: str) -> dict[str, Any]:
    """Return the figures of both sides for a file, and how often their first tokens were equal."""
    plan = f'{{"max_length": {CONTEXT}}}'
    ours = [python, *JAX_WORKER, str(file), "--plan", plan, "--no-warm-up"]
    theirs = [peer, str(PEER_WORKER), str(file), str(cores), str(CONTEXT)]
    earlier, _ = start(ours, cores)
    earlier.ask(request(DECODED, PROMPTS[-1], 0))
    time.sleep(2)  # programs for long prompts are compiled after the request
    earlier.ask(request(2, CONTEXT - 64, 0))
    earlier.close()
    workers, figures = {}, {}
    for name, command in ((THEIRS, theirs), (OURS, ours)):
        workers[name], figures[name] = start(command, cores)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    equal = total = 0
    for seed in range(1, rounds + 2):
        firsts = []
        for name, worker in workers.items():
            found = samples[name] if seed > 1 else {}  # the first round is not counted
            for tokens in PROMPTS:
                answer = worker.ask(request(1, tokens, seed))
                found.setdefault(f"first token of {tokens}, s", []).append(answer["prefill_s"])
            answer = worker.ask(request(DECODED + 1, 60, seed))
            found.setdefault("tokens/s", []).append(DECODED / answer["decode_s"])
            firsts.append(answer["tokens"][:8])
        equal, total = equal + (firsts[0] == firsts[1]), total + 1
    for name, worker in workers.items():
        figures[name] |= {"memory_mb": memory_mb(worker.pid)}
        figures[name] |= {key: spread(numbers).to_json() for key, numbers in samples[name].items()}
        worker.close()
    over = {
        key: statistics.median(
            a / b for a, b in zip(samples[OURS][key], samples[THEIRS][key], strict=True)
        )
        for key in samples[OURS]
    }
    figures["file_mb"] = file.stat().st_size / 1e6
    return figures | {"over": over, "same_first_8_tokens": f"{equal} of {total}"}


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return both sides' figures of every file, theirs / ours, in Markdown."""

    def both(found: Mapping[str, Any], *keys: str, digits: int = 0) -> str:
        shown = []
        for side in (THEIRS, OURS):
            number = found[side]
            for key in keys:
                number = number[key]
            shown.append(f"{number:.{digits}f}")
        return " / ".join(shown)

    prompts = [f"first token of {tokens}, s" for tokens in PROMPTS]
    rows = [
        [
            name,
            both(found, "tokens/s", "median", digits=1),
            *(both(found, key, "median", digits=3) for key in prompts),
            both(found, "load_s", digits=1),
            both(found, "first_answer_s", digits=1),
            both(found, "memory_mb", "resident"),
            both(found, "memory_mb", "peak"),
        ]
        for name, found in figures.items()
    ]
    headings = f"file, llama.cpp / ours | tokens/s | {' | '.join(prompts)} | loaded, s"
    return markdown(f"{headings} | first answer, s | resident MB | peak MB", rows)


def main(words: Sequence[str] | None = None) -> int:
    """Measure every file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="with xllamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    if missing := [str(file) for file in options.files if not file.is_file()]:
        parser.error(f"{missing[0]} is no file")
    figures = {}
    for file in options.files:
        chosen = (options.peer, options.cores, options.rounds, sys.executable)
        figures[file.stem] = measure(file, *chosen)
        print(*table({file.stem: figures[file.stem]}), sep="\n", flush=True)
        shown = {"load_average": os.getloadavg()[0], "figures": figures}
        write_result(options.json, "gguf_files", shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
