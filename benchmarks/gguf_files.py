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
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import ENVIRONMENT, WINDOW, logits_of, scores, windows_of
from benchmarks.environment import write_result
from benchmarks.llama_cpp.worker import Worker, our_command, prebuilt_command
from benchmarks.paired import markdown, spread
from benchmarks.processes import memory_mb

OURS = "ours"
THEIRS = "llama.cpp"
PROMPTS = (1, 10, 60, 580)  # tokens
SHOWN_PROMPTS = (10, 580)  # in the table
CONTEXT = 2048
DECODED = 64  # tokens after the first
# Ids of the tokens of prompts: every vocabulary has these.
LEAST_ID = 100
MOST_ID = 30_000


def request(count: int, tokens: int, seed: int) -> str:
    """Return a request of workers for `count` tokens after random ones, past end tokens."""
    draw = random.Random(f"{tokens} {seed}")
    ids = ",".join(str(draw.randrange(LEAST_ID, MOST_ID)) for _ in range(tokens))
    return f"plain {count} {ids} 0"


def start(command: Sequence[str], cores: int) -> tuple[Worker, dict[str, float]]:
    """Return a worker, and seconds until it was loaded and until its first answer to 10 tokens."""
    started = time.perf_counter()
    worker = Worker(command, cores)
    loaded = time.perf_counter() - started
    worker.ask(request(1, 10, 0))
    return worker, {"load_s": loaded, "first_answer_s": time.perf_counter() - started}


def measure(file: Path, peer: str, cores: int, rounds: int) -> dict[str, Any]:
    """Return the figures of both sides for a file, and how often their first tokens were equal."""
    ours = our_command(file, {"max_length": CONTEXT}, warm_up=False)
    theirs = prebuilt_command(peer, file, cores=cores, context=CONTEXT)
    earlier, _ = start(ours, cores)
    earlier.ask(request(DECODED, PROMPTS[-1], 0))
    time.sleep(2)  # programs for long prompts are compiled after the request
    earlier.ask(request(2, CONTEXT - 64, 0))
    earlier.close()
    workers = {}
    figures = {}
    for name, command in ((THEIRS, theirs), (OURS, ours)):
        workers[name], figures[name] = start(command, cores)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    equal = 0
    total = rounds + 1
    for seed in range(1, rounds + 2):
        firsts = []
        for name, worker in workers.items():
            series = samples[name] if seed > 1 else {}  # the first round is not counted
            for tokens in PROMPTS:
                answer = worker.ask(request(1, tokens, seed))
                series.setdefault(f"first token of {tokens}, s", []).append(answer["prefill_s"])
            answer = worker.ask(request(DECODED + 1, 60, seed))
            series.setdefault("tokens/s", []).append(DECODED / answer["decode_s"])
            firsts.append(answer["tokens"][:8])
        if firsts[0] == firsts[1]:
            equal += 1
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
FLOAT32 = {"dtype": "float32", "weights": "float"}


def compare_logits(
    file: Path, peer: str, cores: int, *, source: Path | None, exact: bool
) -> dict[str, Any]:
    """Return how far both sides' logits of a file are from float32, and its weights' formats.

    Args:
      source: the file that it was made of.
      exact: compare llama.cpp's of the file in F32, too.
    """
    windows = windows_of("english", file)[:WINDOWS]

    def ours(path: Path, plan: Mapping[str, Any]) -> np.ndarray:
        command = our_command(path, plan, warm_up=False)
        with Worker(command, cores, environment=ENVIRONMENT) as worker:
            forms.update({} if plan else worker.first["forms"])
            return logits_of(worker, windows)

    def theirs(path: Path, *, float32: bool = False) -> np.ndarray:
        command = prebuilt_command(peer, path, cores=cores, context=2 * WINDOW, float32=float32)
        with Worker(command, cores) as worker:
            return logits_of(worker, windows)

    forms: dict[str, int] = {}
    reference = ours(file, FLOAT32)

    def apart(logits: np.ndarray, other: np.ndarray) -> dict[str, float]:
        return dataclasses.asdict(scores(logits, other, windows))

    distances: dict[str, Any] = {"tokens": windows.size, "file_mb": file.stat().st_size / 1e6}
    distances["packed"] = {
        OURS: apart(ours(file, {}), reference),
        THEIRS: apart(theirs(file), reference),
    }
    distances["forms"] = forms
    if source is not None:
        distances["from_source"] = apart(reference, ours(source, FLOAT32))
    if exact:
        from dflash_jax.converters.convert import convert
        from dflash_jax.converters.models import open_model

        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder, "whole.gguf")
            convert(open_model(file), whole, to="gguf", dtype="f32")
            distances["float32"] = {THEIRS: apart(theirs(whole, float32=True), reference)}
    return distances


def compare_encoders(peer: str) -> dict[str, Any]:
    """Return errors of quantised weights, and CPU seconds for a million, by type.

    Weights are normal, with rows and columns of unlike size; errors are relative to them.
    """
    from dflash_jax.converters.formats.quants import decode
    from dflash_jax.converters.formats.quants.encode import ENCODERS, encode
    from dflash_jax.converters.formats.quants.types import BY_NAME

    rng = np.random.default_rng(0)
    rows, columns = DRAWN
    sizes = np.exp(0.5 * rng.standard_normal((rows, 1))) * np.exp(
        0.5 * rng.standard_normal(columns)
    )
    weights = (0.02 * sizes * rng.standard_normal(DRAWN)).astype(np.float32)
    by_type: dict[str, Any] = {}

    def error(name: str, blocks: np.ndarray) -> float:
        decoded = np.empty_like(weights)
        decode(BY_NAME[name], blocks.reshape(rows, -1), decoded)
        return float(np.linalg.norm(decoded - weights) / np.linalg.norm(weights))

    with (
        tempfile.TemporaryDirectory() as folder,
        Worker(prebuilt_command(peer, None, cores=1, context=1), 1) as worker,
    ):
        path = Path(folder, "weights")
        for name in ENCODERS:
            started = time.process_time()
            ours = encode(BY_NAME[name], weights)
            seconds = time.process_time() - started
            weights.tofile(path)
            answer = worker.ask(f"encode {path} {BY_NAME[name].number},{rows},{columns}")
            theirs = np.fromfile(path, np.uint8)
            by_type[name] = {
                "bits": 8 * BY_NAME[name].block_bytes / BY_NAME[name].block_size,
                OURS: {"error": error(name, ours), "cpu_s": seconds * 1e6 / weights.size},
                THEIRS: {
                    "error": error(name, theirs),
                    "cpu_s": answer["cpu_s"] * 1e6 / weights.size,
                },
            }
    return by_type


def encoders_table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return errors in per cent and CPU seconds of every type, ours / llama.cpp's, in Markdown."""
    rows = [
        [
            name,
            f"{of_type['bits']:g}",
            " / ".join(f"{100 * of_type[side]['error']:.3f}" for side in (OURS, THEIRS)),
            " / ".join(f"{of_type[side]['cpu_s']:.3f}" for side in (OURS, THEIRS)),
        ]
        for name, of_type in sorted(figures.items(), key=lambda item: -item[1]["bits"])
    ]
    return markdown("type | bits | error, % | CPU seconds for a million weights", rows)


def logits_table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the distances of every file, ours / llama.cpp's, in Markdown."""
    rows = []
    for name, of_file in figures.items():
        sides = [of_file["packed"][side] for side in (OURS, THEIRS)]
        source = of_file.get("from_source")
        exact = of_file.get("float32")
        cells = [
            name,
            f"{of_file['file_mb']:.0f}",
            " / ".join(f"{side['kl_divergence']:.5f}" for side in sides),
            " / ".join(f"{100 * side['greedy_agreement']:.1f}" for side in sides),
            f"{source['kl_divergence']:.4f}" if source else "",
            f"{100 * source['greedy_agreement']:.1f}" if source else "",
            f"{exact[THEIRS]['relative_error']:.0e}" if exact else "",
            ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in of_file["forms"].items()),
        ]
        rows.append(cells)
    return markdown(
        "file | MB | KL, ours / llama.cpp | same greedy token, % | KL from the source |"
        " same token, % | llama.cpp in float32 | weights in memory, MB",
        rows,
    )


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return both sides' figures of every file, ours / llama.cpp's, in Markdown."""

    def both(of_file: Mapping[str, Any], *keys: str, digits: int = 0) -> str:
        shown = []
        for side in (OURS, THEIRS):
            number = of_file[side]
            for key in keys:
                number = number[key]
            shown.append(f"{number:.{digits}f}")
        return " / ".join(shown)

    prompts = [f"first token of {tokens}, s" for tokens in SHOWN_PROMPTS]
    rows = [
        [
            name,
            both(of_file, "tokens/s", "median", digits=1),
            f"{of_file['over']['tokens/s']:.2f}",
            *(both(of_file, key, "median", digits=3) for key in prompts),
            both(of_file, "first_answer_s", digits=1),
            both(of_file, "memory_mb", "resident"),
        ]
        for name, of_file in figures.items()
    ]
    headings = f"file | tokens/s, ours / llama.cpp | ratio | {' | '.join(prompts)}"
    return markdown(f"{headings} | first answer after a start, s | resident MB", rows)


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
    for file in options.files:
        if options.logits:
            figures[file.stem] = compare_logits(
                file,
                options.peer,
                options.cores,
                source=options.source,
                exact=options.exact,
            )
            print(*logits_table({file.stem: figures[file.stem]}), sep="\n", flush=True)
            write_result(options.json, "gguf_logits", {"figures": figures})
        else:
            figures[file.stem] = measure(file, options.peer, options.cores, options.rounds)
            print(*table({file.stem: figures[file.stem]}), sep="\n", flush=True)
            shown = {"load_average": os.getloadavg()[0], "figures": figures}
            write_result(options.json, "gguf_files", shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
