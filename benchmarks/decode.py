"""Decoding speed as paired ratios over the official package, plain decoding and bare loops.

    pip install torch==2.13.0 transformers==5.15.0 dflash==0.1.0
    python -m benchmarks.decode [--configs tiny,9m,60m] [--rounds 1,16] [--pairs 9] [--json OUT]

One process on one pinned core, float32, decoders interleaved (A B A B); prefill is timed
separately. Results are reported only if all decoders gave the same tokens and both engines the
same acceptance lengths. The column `cpu` is the ratio of CPU seconds, which is less sensitive to
other work on the machine. `--rounds` lists maximum numbers of steps per call (0: the default of
the plan); every case is measured once for each. The official package is skipped where it is not
installed, and by `--no-official`.

`device_loop` has no requests, and runs all rounds of an answer in one call.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.cases import Case, Work
    from benchmarks.modes import Run
    from benchmarks.paired import Samples

OFFICIAL = ("torch", "transformers", "dflash")  # packages of the peer
WIDTH = 200  # columns of the table, so that it stays one


class DifferentTokensError(Exception):
    """Two decoders that must agree gave different tokens."""


@dataclasses.dataclass
class Decoder:
    """A way of decoding a case; each call takes one sample and keeps its output."""

    run: "Callable[[Work], Run]"
    case: "Case"
    runs: "list[Run]" = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)  # tokens per CPU second

    def __call__(self) -> float:
        """Decode all prompts of the case and return tokens per second."""
        self.runs = [self.run(work) for work in self.case.work]
        self.prefill.append(sum(run.prefill_s for run in self.runs))
        tokens = sum(len(run.token_ids) - 1 for run in self.runs)
        self.cpu.append(tokens / sum(run.decode_cpu_s for run in self.runs))
        return tokens / sum(run.decode_s for run in self.runs)

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of every answer of the last sample."""
        return [run.token_ids for run in self.runs]

    @property
    def lengths(self) -> list[list[int]]:
        """The tokens of every round of these answers."""
        return [run.acceptance_lengths for run in self.runs]


def decoders_of(case: "Case", *, official: bool) -> dict[str, Decoder]:
    """Return the decoders of a case; a first run determines the rounds of the device loop."""
    from benchmarks.cases import Work
    from benchmarks.modes import DeviceLoop, generate
    from dflash_jax.bench.compare import one_token_engine

    single = one_token_engine(case.engine)
    loop = DeviceLoop(case.engine)

    def decoded(engine: Any, work: Work, *, speculative: bool = True) -> Run:
        case.use_script(work)
        return generate(
            engine,
            work.prompt,
            max_tokens=case.max_tokens,
            ignore_eos=not case.stop_ids,
            speculative=speculative,
        )

    rounds = {
        tuple(work.prompt): len(decoded(case.engine, work).acceptance_lengths) for work in case.work
    }

    def on_device(work: Work) -> Run:
        return loop.run(
            work.prompt,
            max_tokens=case.max_tokens,
            stop_ids=case.stop_ids,
            rounds=rounds[tuple(work.prompt)],
        )

    decoders: dict[str, Callable[[Work], Run]] = {
        "ours": lambda work: decoded(case.engine, work),
        "plain": lambda work: decoded(case.engine, work, speculative=False),
        "plain1": lambda work: decoded(single, work),
        "device_loop": on_device,
    }
    if official:
        decoders |= official_decoders(case)
    return {name: Decoder(run, case) for name, run in decoders.items()}


def official_decoders(case: "Case") -> "dict[str, Callable[[Work], Run]]":
    """Return the official package's decoders: drafting, and plain."""
    from benchmarks.official import Official

    theirs = Official(case.engine)

    def drafted(work: "Work") -> "Run":
        return theirs.generate(
            work.prompt, script=work.script, max_tokens=case.max_tokens, stop_ids=case.stop_ids
        )

    def plain(work: "Work") -> "Run":
        return theirs.generate(
            work.prompt, block=1, max_tokens=case.max_tokens, stop_ids=case.stop_ids
        )

    return {"official": drafted, "official_plain": plain}


def check(decoders: dict[str, Decoder]) -> dict[str, bool]:
    """Return which decoders agree with ours.

    Raises:
      DifferentTokensError: a decoder disagrees.
    """
    ours = decoders["ours"]
    agree = {f"tokens {name}": decoder.tokens == ours.tokens for name, decoder in decoders.items()}
    for name in ("official", "device_loop"):
        if name in decoders:
            agree[f"acceptance lengths {name}"] = decoders[name].lengths == ours.lengths
    if not all(agree.values()):
        wrong = [name for name, equal in agree.items() if not equal]
        raise DifferentTokensError(f"{ours.case.name}: differs from ours: {', '.join(wrong)}")
    return agree


def measure(case: "Case", pairs: int, *, official: bool) -> dict[str, Any]:
    """Measure all series of a case, each interleaved, and their ratios."""
    from benchmarks.paired import interleaved

    decoders = decoders_of(case, official=official)
    for decoder in decoders.values():
        decoder()
    agree = check(decoders)
    series = {"plain": ("ours", "plain", "plain1"), "device_loop": ("ours", "device_loop")}
    if official:
        series = {"official": ("ours", "official", "official_plain")} | series
    report: dict[str, Any] = {"case": case.describe(), "agree": agree, "series": {}}
    for name, members in series.items():
        samples = interleaved({m: decoders[m] for m in members}, pairs)
        baseline = faster(samples) if name == "plain" else name
        cpu = {m: decoders[m].cpu[-pairs:] for m in members}
        report["series"][name] = compared(samples, cpu, baseline)
        check(decoders)
    lengths = [n for run in decoders["ours"].lengths for n in run]
    report["acceptance_length"] = sum(lengths) / len(lengths)
    report["rounds"] = len(lengths)
    report["decode_tokens"] = sum(lengths)
    report["prefill_s"] = {name: prefill(decoder) for name, decoder in decoders.items()}
    return report


def compared(samples: "Samples", cpu: "Samples", baseline: str) -> dict[str, Any]:
    """Return all samples, and the ratios of ours over a baseline."""
    from benchmarks.paired import ratio

    return {
        "tokens_per_s": samples,
        "tokens_per_cpu_s": cpu,
        "baseline": baseline,
        "ratio": ratio(samples, "ours", baseline).to_json(),
        "cpu_ratio": ratio(cpu, "ours", baseline).to_json(),
    }


def faster(samples: "Samples") -> str:
    """Return the faster form of plain decoding, the baseline of speculation."""
    from benchmarks.paired import spread

    return max(("plain", "plain1"), key=lambda name: spread(samples[name]).median)


def prefill(decoder: Decoder) -> dict[str, Any]:
    """Return the seconds of prefill over all prompts, without the untimed runs."""
    from benchmarks.paired import spread

    return spread(decoder.prefill[2:]).to_json()


HEADINGS = ("case", "over", "ratio", "quartiles", "min", "cpu", "tok/s", "of other", "tau")


def table(reports: dict[str, Any]) -> str:
    """Return one line per case and comparison; "tiny:16" has up to 16 steps per call."""
    from dflash_jax.cli import terminal

    rows = []
    for name, report in reports.items():
        for series in report["series"].values():
            ratio = series["ratio"]
            baseline = series["baseline"]
            first, third = ratio["quartiles"]
            cells = [name, baseline, f"{ratio['median']:.3f}", f"{first:.3f}-{third:.3f}"]
            cells += [f"{ratio['low']:.3f}", f"{series['cpu_ratio']['median']:.3f}"]
            for decoder in ("ours", baseline):
                cells.append(f"{statistics.median(series['tokens_per_s'][decoder]):.1f}")
            cells.append(f"{report['acceptance_length']:.3f}")
            rows.append(cells)
    return terminal.table(HEADINGS, rows, WIDTH)


OVER = {
    "official": "the official package",
    "plain": "plain decoding",
    "device_loop": "a loop on the device",
}


def ratios_table(reports: dict[str, Any]) -> list[str]:
    """Return acceptance lengths and median ratios of every case in Markdown."""
    from benchmarks.paired import markdown

    over = [name for name in OVER if any(name in report["series"] for report in reports.values())]
    rows = []
    for case, report in reports.items():
        series = report["series"]
        ratios = [
            f"{series[name]['ratio']['median']:.2f}" if name in series else "" for name in over
        ]
        rows.append([case, f"{report['acceptance_length']:.2f}", *ratios])
    headings = ["case", "acceptance length", *(f"over {OVER[name]}" for name in over)]
    return markdown(" | ".join(headings), rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="tiny,9m,60m", help="also: tiny-random")
    parser.add_argument("--rounds", default="0", metavar="N,...", help="maximum steps per call")
    parser.add_argument("--pairs", type=int, default=9, help="samples of each decoder, at least 7")
    parser.add_argument("--pin", type=int, default=0, metavar="CPU", help="-1 leaves all cores")
    parser.add_argument("--max-length", type=int, default=0, help="of the plan; fits by default")
    parser.add_argument("--budget", type=float, default=1800, help="seconds; starts no case after")
    parser.add_argument("--no-official", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.pairs < 7:
        parser.error(f"--pairs is {options.pairs}; expected at least 7")
    if not all(n.isdecimal() for n in options.rounds.split(",")):
        parser.error(f"--rounds is {options.rounds}; expected numbers, like 1,16")
    return options


def pin(cpu: int) -> None:
    """Pin this process to one core; call before jax and torch start their threads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if cpu >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})


def main() -> int:
    """Measure every case and print the table; return 1 if decoders disagree."""
    options = arguments()
    pin(options.pin)
    from benchmarks.cases import build
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    started = time.perf_counter()
    reports = {}
    missing = [name for name in OFFICIAL if importlib.util.find_spec(name) is None]
    if missing and not options.no_official:
        print(f"skipped: the official package, since {', '.join(missing)} is not installed")
    official = not options.no_official and not missing
    chosen = itertools.product(options.configs.split(","), map(int, options.rounds.split(",")))
    for config, rounds in chosen:
        name = f"{config}:{rounds}" if rounds else config
        if time.perf_counter() - started > options.budget:
            print(f"{name}: skipped, the budget of {options.budget:.0f} s is spent")
            continue
        load = os.getloadavg()[0]
        try:
            case = build(config, max_length=options.max_length, rounds=rounds)
            report = measure(case, options.pairs, official=official)
        except DifferentTokensError as error:
            print(error, file=sys.stderr)
            return 1
        reports[name] = report | {"load_before": load, "load_after": os.getloadavg()[0]}
        print(table({name: reports[name]}), flush=True)
    write_result(options.json, "decode", {"pinned": options.pin, "cases": reports})
    return 0


if __name__ == "__main__":
    sys.exit(main())
