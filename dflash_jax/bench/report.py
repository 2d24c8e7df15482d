"""Results of a benchmark: figures and a plot."""

import collections
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.bench.prompts import BenchmarkPrompt
from dflash_jax.bench.runs import BenchmarkBackend, Sample
from dflash_jax.errors import RequestError, install_hint
from dflash_jax.utils.progress import ShownCount
from dflash_jax.version import __version__


@dataclasses.dataclass(frozen=True)
class BenchmarkRun:
    """One decoding mode at one concurrency, all repeats."""

    concurrency: int
    mode: str
    samples: list[Sample]  # of the last repeat
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
        return [n for sample in self.samples for n in sample.acceptance_lengths]

    def to_json(self) -> dict[str, Any]:
        """Return all figures; times in seconds."""
        lengths, rounds = self.lengths, len(self.lengths)
        drafts = max((s.drafts for s in self.samples), default=0)
        histogram = collections.Counter(lengths)
        first = sorted(sample.first_token_s for sample in self.samples)
        speeds = [(s.tokens - 1) / s.decode_s for s in self.samples if s.decode_s > 0]
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
            "draft_acceptance_rate": (sum(lengths) - rounds) / (rounds * drafts)
            if drafts
            else None,
            "accepted_per_position": [
                sum(n > place + 1 for n in lengths) / rounds for place in range(drafts)
            ],
            "acceptance_histogram": {str(n): histogram[n] for n in range(1, drafts + 2)},
        }


def measure(
    backend: BenchmarkBackend,
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
    """Return environment, settings, runs and pairs of speculative and plain runs as JSON.

    `equal_outputs` of a pair is None for sampled output: both modes sample the target's
    distribution, but not the same tokens.
    """
    pairs = []
    for concurrency, (fast, slow) in _pairs(runs).items():
        same = [a.ids == b.ids for a, b in zip(fast.samples, slow.samples, strict=True)]
        pairs.append(
            {
                "concurrency": concurrency,
                "speedup": fast.throughput / slow.throughput,
                "equal_outputs": None if settings["temperature"] else sum(same),
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
        levels, values = [r["concurrency"] for r in runs], [r["tokens_per_s"] for r in runs]
        speed.plot(levels, values, marker="o", label=mode)
    speed.set(xlabel="concurrent requests", ylabel="output tokens per second")
    speed.legend()
    drafted = next((run for run in report["runs"] if run["accepted_per_position"]), None)
    if drafted:
        shares, histogram = drafted["accepted_per_position"], drafted["acceptance_histogram"]
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
