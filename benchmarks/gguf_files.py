"""GGUF files beside the prebuilt llama.cpp: plain decoding, prompts, starts and memory.

    python -m benchmarks.gguf_files FILE.gguf ... --peer PYTHON [--rounds 5] [--json OUT]
    python -m benchmarks.gguf_files FILE.gguf ... --peer PYTHON --logits [--source FILE] [--exact]
    python -m benchmarks.gguf_files --peer PYTHON --encoders [--json OUT]

PYTHON is that of an environment with `pip install xllamacpp`. Both sides load the file once and
answer the same token ids in turn, greedily, with default settings. Our side is started once before,
so that the start that counts finds its compiled programs, as every start but the first does.

With --logits, both sides' logits of English prose are compared with ours in float32 of the same
file; with --source also those with float32 of the file that it was made of, and with --exact
llama.cpp's of the file in F32, with keys and values in float32. With --encoders, drawn weights are
quantised by both.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import WINDOW, logits_of, scores, windows_of
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


DRAWN = (1024, 2048)  # weights that encoders are compared on
WINDOWS = 2  # of `WINDOW` tokens
FLOAT32 = '{"dtype": "float32", "weights": "float"}'


def compare_logits(
    file: Path, peer: str, cores: int, python: str, *, source: Path | None, exact: bool
) -> dict[str, Any]:
    """Return how far both sides' logits of a file are from float32, and its weights' formats.

    Args:
      source: the file that it was made of.
      exact: compare llama.cpp's of the file in F32, too.
    """
    windows = windows_of("english", file)[:WINDOWS]
    environment = {"JAX_PLATFORMS": "cpu", "DFLASH_PROGRESS": "off"}

    def ours(path: Path, plan: str) -> np.ndarray:
        command = [python, *JAX_WORKER, str(path), "--plan", plan, "--no-warm-up"]
        with Worker(command, cores, environment=environment) as worker:
            forms.update(worker.first["forms"] if plan == "{}" else {})
            return logits_of(worker, windows)

    def theirs(path: Path, *more: str) -> np.ndarray:
        command = [peer, str(PEER_WORKER), str(path), str(cores), str(2 * WINDOW), *more]
        with Worker(command, cores) as worker:
            return logits_of(worker, windows)

    forms: dict[str, int] = {}
    reference = ours(file, FLOAT32)

    def apart(logits: np.ndarray, other: np.ndarray) -> dict[str, float]:
        return dataclasses.asdict(scores(logits, other, windows))

    found: dict[str, Any] = {"tokens": windows.size, "file_mb": file.stat().st_size / 1e6}
    found["packed"] = {
        OURS: apart(ours(file, "{}"), reference),
        THEIRS: apart(theirs(file), reference),
    }
    found["forms"] = forms
    if source is not None:
        found["from_source"] = apart(reference, ours(source, FLOAT32))
    if exact:
        from dflash_jax.converters.convert import convert
        from dflash_jax.converters.models import open_model

        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder, "whole.gguf")
            convert(open_model(file), whole, to="gguf", dtype="f32")
            found["float32"] = {THEIRS: apart(theirs(whole, "float32"), reference)}
    return found


def compare_encoders(peer: str) -> dict[str, Any]:
    """Return errors of quantised weights, and CPU seconds for a million, by type.

    Weights are normal, with rows and columns of unlike size; errors are relative to them.
    """
    from dflash_jax.converters.quants import decode
    from dflash_jax.converters.quants.encode import ENCODERS, encode
    from dflash_jax.converters.quants.types import BY_NAME

    rng = np.random.default_rng(0)
    rows, columns = DRAWN
    sizes = np.exp(0.5 * rng.standard_normal((rows, 1))) * np.exp(
        0.5 * rng.standard_normal(columns)
    )
    weights = (0.02 * sizes * rng.standard_normal(DRAWN)).astype(np.float32)
    found: dict[str, Any] = {}

    def error(name: str, blocks: np.ndarray) -> float:
        decoded = np.empty_like(weights)
        decode(BY_NAME[name], blocks.reshape(rows, -1), decoded)
        return float(np.linalg.norm(decoded - weights) / np.linalg.norm(weights))

    with (
        tempfile.TemporaryDirectory() as folder,
        Worker([peer, str(PEER_WORKER), "-", "1", "1"], 1) as worker,
    ):
        path = Path(folder, "weights")
        for name in ENCODERS:
            started = time.process_time()
            ours = encode(BY_NAME[name], weights)
            seconds = time.process_time() - started
            weights.tofile(path)
            answer = worker.ask(f"encode {path} {BY_NAME[name].number},{rows},{columns}")
            theirs = np.fromfile(path, np.uint8)
            found[name] = {
                "bits": 8 * BY_NAME[name].block_bytes / BY_NAME[name].block_size,
                OURS: {"error": error(name, ours), "cpu_s": seconds * 1e6 / weights.size},
                THEIRS: {
                    "error": error(name, theirs),
                    "cpu_s": answer["cpu_s"] * 1e6 / weights.size,
                },
            }
    return found


def encoders_table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return errors in per cent and CPU seconds of every type, ours / llama.cpp's, in Markdown."""
    rows = [
        [
            name,
            f"{found['bits']:g}",
            " / ".join(f"{100 * found[side]['error']:.3f}" for side in (OURS, THEIRS)),
            " / ".join(f"{found[side]['cpu_s']:.3f}" for side in (OURS, THEIRS)),
        ]
        for name, found in sorted(figures.items(), key=lambda item: -item[1]["bits"])
    ]
    return markdown("type | bits | error, % | CPU seconds for a million weights", rows)


def logits_table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the distances of every file, ours / llama.cpp's, in Markdown."""
    rows = []
    for name, found in figures.items():
        sides = [found["packed"][side] for side in (OURS, THEIRS)]
        source = found.get("from_source")
        exact = found.get("float32")
        cells = [
            name,
            f"{found['file_mb']:.0f}",
            " / ".join(f"{side['kl_divergence']:.5f}" for side in sides),
            " / ".join(f"{100 * side['greedy_agreement']:.1f}" for side in sides),
            f"{source['kl_divergence']:.4f}" if source else "",
            f"{100 * source['greedy_agreement']:.1f}" if source else "",
            f"{exact[THEIRS]['relative_error']:.0e}" if exact else "",
            ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in found["forms"].items()),
        ]
        rows.append(cells)
    return markdown(
        "file | MB | KL, ours / llama.cpp | same greedy token, % | KL from the source |"
        " same token, % | llama.cpp in float32 | weights in memory, MB",
        rows,
    )


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
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="with xllamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--encoders", action="store_true", help="quantise drawn weights")
    parser.add_argument("--logits", action="store_true", help="compare logits, not speed")
    parser.add_argument("--source", type=Path, metavar="FILE", help="that the files were made of")
    parser.add_argument("--exact", action="store_true", help="also in float32")
    parser.add_argument("--add", action="store_true", help="to the figures in OUT")
    options = parser.parse_args(words)
    if missing := [str(file) for file in options.files if not file.is_file()]:
        parser.error(f"{missing[0]} is no file")
    if not options.files and not options.encoders:
        parser.error("give files, or --encoders")
    if options.encoders:
        errors = compare_encoders(options.peer)
        print(*encoders_table(errors), sep="\n")
        write_result(options.json, "gguf_encoders", {"figures": errors})
        return 0
    figures = json.loads(options.json.read_text("utf-8"))["figures"] if options.add else {}
    for file in options.files if options.logits else ():
        figures[file.stem] = compare_logits(
            file,
            options.peer,
            options.cores,
            sys.executable,
            source=options.source,
            exact=options.exact,
        )
        print(*logits_table({file.stem: figures[file.stem]}), sep="\n", flush=True)
        write_result(options.json, "gguf_logits", {"figures": figures})
    for file in () if options.logits else options.files:
        chosen = (options.peer, options.cores, options.rounds, sys.executable)
        figures[file.stem] = measure(file, *chosen)
        print(*table({file.stem: figures[file.stem]}), sep="\n", flush=True)
        shown = {"load_average": os.getloadavg()[0], "figures": figures}
        write_result(options.json, "gguf_files", shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
