"""Random interleavings of everything an engine does, compared token by token with plain decoding.

    python -m benchmarks.audit                      # 100,000 tokens, all families and drafters
    python -m benchmarks.audit --seed 3 --case 17   # one case again
    python -m benchmarks.audit --target path/to/Qwen3-8B --drafter path/to/Qwen3-8B-DFlash-b16
    python -m benchmarks.audit shipped [--tokens 64]                   # grids of plans and
    python -m benchmarks.audit families [--only llama] [--tokens 420]  # drafters
    python -m benchmarks.audit sampled [--only llama] [--tokens 60]    # temperatures and filters
    python -m benchmarks.audit load [--target tiny] [--requests 2000]  # requests of every kind
    python -m benchmarks.audit serve [--minutes 20] [--fuzz 10] [--only-load]  # to a server
    python -m benchmarks.audit attack [--only WORD] [OPTION of dflash-jax serve...]

Scenarios combine rows, prefix caches and folders, cancellations, failed steps, recovery, structured
output, penalties, block sizes and sampled neighbours. Every answer must have the tokens,
text, finish reason and recovery statistics of its request decoded alone, without drafting, with the
same plan. Exits with 1 if an answer differs, after printing the command that repeats the case.
`presets.py`, `serve.py` and `attacks.py` describe the others, which exit with 1 if a check fails.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.audit import attacks, presets, serve
from benchmarks.audit.models import (
    FAMILIES,
    GIVEN,
    SHIPPED,
    SHORT,
    SHORT_CASES,
    AuditedEngine,
    Course,
    build,
)
from benchmarks.audit.runner import Counts, run_case
from benchmarks.audit.scenario import Scenario, draw_scenario
from benchmarks.environment import write_result
from dflash_jax.testing import QUICK_COMPILE

ALL = (len(FAMILIES) + 1) * 2  # setups that cover every family and drafter
EVERY = 10.0  # seconds between progress lines
NAMED: dict[str, Callable[[list[str]], int]] = {
    **{name: functools.partial(presets.grid, name) for name in presets.GRIDS},
    "load": presets.load,
    "serve": serve.serve,
    "attack": attacks.attack,
}


def main(arguments: list[str] | None = None) -> int:
    """Run cases and write the result; return 1 if an answer differs."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in NAMED:
        return NAMED[words[0]](words[1:])
    options = _parse(words)
    if options.quick_compile:  # read when jax initialises its backends
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_COMPILE])
    audit = Audit(options)
    try:
        audit.run()
    except KeyboardInterrupt:
        print(f"stopped; --resume continues with case {audit.written}", file=sys.stderr)
        return 130
    return audit.report()


class Audit:
    """A run of cases, with its results so far."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._family = GIVEN if options.target else options.family
        self._course = Course(options.seed, options.short, self._family)
        self.case: int = options.case if options.case is not None else options.first
        self.written = self.case  # first case of a run that resumes this one
        self._counts: Counts = collections.Counter()
        self._setups: list[dict[str, Any]] = []
        self._differences: list[dict[str, Any]] = []
        self._seconds = 0.0
        self._said = 0.0  # time of the last progress line
        if options.resume and options.out.is_file():
            self._resume(json.loads(options.out.read_text(encoding="utf-8")))

    @property
    def single(self) -> bool:
        """Whether a single case is repeated, which writes no result."""
        return self._options.case is not None or self._options.scenario is not None

    def run(self) -> None:
        """Run cases, setup by setup, until there are enough."""
        while not self._enough():
            self._run_setup()

    def _run_setup(self) -> None:
        started = time.perf_counter()
        options = self._options
        setup = self._course.setup(self.case)
        print(f"case {self.case}: {setup}", file=sys.stderr, flush=True)
        if options.target:
            audited = build(setup, target=options.target, drafter=options.drafter)
        else:
            audited = build(setup)
        line = {"setup": dataclasses.asdict(setup), "first_case": self.case}
        line["compile_s"] = round(time.perf_counter() - started, 1)
        before = self._counts.copy()
        for case in [self.case] if self.single else self._course.rest(self.case):
            self._run_case(audited, case)
            if self._enough(within=True):
                break
        self._counts["setups"] += 1
        line |= {"counts": dict(self._counts - before)}
        self._setups.append(line)
        self._seconds += time.perf_counter() - started
        if not self.single:
            self._write()
        del audited
        jax.clear_caches()
        gc.collect()

    def _run_case(self, audited: AuditedEngine, case: int) -> None:
        options = self._options
        if options.scenario:
            scenario = Scenario.from_json(options.scenario.read_text(encoding="utf-8"))
        else:
            scenario = draw_scenario(options.seed, case, audited.limits)
        if options.write:
            options.write.write_text(scenario.to_json(), encoding="utf-8")
        differences, counts = run_case(audited, scenario)
        self._counts += counts + collections.Counter(differences=len(differences))
        for text in differences:
            command = self._command(case)
            print(f"DIFFERS: {text}\n  {command}", flush=True)
            self._differences.append({"case": case, "what": text, "command": command})
        self.case = case + 1
        if time.perf_counter() > self._said + EVERY:
            self._said = time.perf_counter()
            tokens = self._counts["tokens"]
            wrong = self._counts["differences"]
            print(
                f"case {case}: {tokens:,} tokens, {wrong} differences", file=sys.stderr, flush=True
            )

    def _enough(self, *, within: bool = False) -> bool:
        """Return whether the requested number of cases or tokens is reached.

        Args:
          within: whether the next case has the same setup.
        """
        options = self._options
        done = self._counts["cases"]
        if self.single:
            return done > 0
        if options.cases is not None:
            return done >= options.cases
        if options.short:
            return done >= SHORT_CASES * len(SHORT)
        setups = self._counts["setups"]
        if within:  # the current setup is not counted yet
            setups += 1
        covered = bool(self._family) or setups >= ALL
        return covered and self._counts["tokens"] >= options.tokens

    def _command(self, case: int) -> str:
        options = self._options
        words: list[Any] = ["python", "-m", "benchmarks.audit", "--seed", options.seed]
        words += ["--case", case]
        if options.short:
            words.append("--short")
        if options.quick_compile:
            words.append("--quick-compile")
        for name in ("target", "drafter", "family", "scenario"):
            if value := getattr(options, name):
                words += [f"--{name}", value]
        return shlex.join(map(str, words))

    def report(self) -> int:
        """Print the result; return 1 if an answer differs or nothing was compared."""
        counts = self._counts
        print(json.dumps(dict(sorted(counts.items())), indent=1))
        print(
            f"{counts['tokens']:,} tokens of {counts['answers']:,} answers"
            f" compared in {counts['cases']} cases: {counts['differences']} differences"
        )
        return 1 if counts["differences"] or not counts["answers"] else 0

    def _write(self) -> None:
        options = self._options
        if options.short or not options.out:
            return
        result = {
            "seed": options.seed,
            "family": self._family,
            "next_case": self.case,
            "seconds": round(self._seconds, 1),
            "counts": dict(sorted(self._counts.items())),
            "differences": self._differences,
            "setups": self._setups,
        }
        write_result(options.out, "audit", result)
        self.written = self.case

    def _resume(self, result: dict[str, Any]) -> None:
        """Resume after the last case of a result file."""
        if (result["seed"], result["family"]) != (self._options.seed, self._family):
            raise SystemExit(
                f"{self._options.out} is of seed {result['seed']} and family"
                f" {result['family'] or 'all'!r}; give the same, or another --out"
            )
        self.case = self.written = result["next_case"]
        self._seconds = result["seconds"]
        self._counts = collections.Counter(result["counts"])
        self._differences = result["differences"]
        self._setups = result["setups"]


def _parse(arguments: list[str]) -> argparse.Namespace:
    text = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=text[0])
    parser.epilog = f"Others, with options of their own: {', '.join(NAMED)}."
    parser.add_argument("--seed", type=int, default=0, help="of all cases; 0 by default")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare")
    parser.add_argument("--cases", type=int, help="number of cases to run, instead of --tokens")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="case to begin with")
    parser.add_argument("--resume", action="store_true", help="go on where --out ended")
    parser.add_argument("--case", type=int, metavar="N", help="run this case alone")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write its scenario as JSON")
    parser.add_argument(
        "--scenario", type=Path, metavar="FILE", help="run this scenario on the setup of --case"
    )
    parser.add_argument("--short", action="store_true", help="the few setups of `make test`")
    names = [*FAMILIES, SHIPPED]
    parser.add_argument("--family", default="", choices=names, metavar="NAME", help=str(names))
    parser.add_argument("--target", default="", help="audit this model: a path or a hub id")
    parser.add_argument("--drafter", default="", help="its drafter")
    parser.add_argument(
        "--quick-compile",
        action="store_true",
        help="compile without optimising: two programs may then round one sum differently, so a"
        " difference counts if it is also there without this option",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/audit.json"))
    options = parser.parse_args(arguments)
    if options.write and options.case is None:
        parser.error("--write is given without --case; say which case to write")
    if options.scenario and options.case is None:
        parser.error("--scenario is given without --case; say on which case's setup it runs")
    if bool(options.drafter) != bool(options.target):
        parser.error("give both --target and --drafter, or neither; without drafts all are equal")
    return options


if __name__ == "__main__":
    sys.exit(main())
