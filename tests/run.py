"""Run the tests in a few processes, as many at a time as there are processors, up to four.

    python -m tests.run            every behaviour once (`make test`)
    python -m tests.run --rest     what `make test-all` adds: combinations, documents, notebooks
    python -m tests.run --all      both
    python -m tests.run --soak     all tests there are, compiled as for users, which takes hours
    python -m tests.run PATH ...   the tests of these files and folders

A batch is a set of folders that one process runs. So each test file is collected once, and the
engines that the tests of a folder share are compiled once. XLA reads its options once a process:
tests marked `optimised` need the options of users, and have a batch of their own.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# The longest batches first: the last ones fill the time that is left.
FOLDERS = {
    "engine": ["engine", "hosts"],
    "weights": ["converters", "kernels", ""],  # "": the files at the top
    "models": ["models", "quant"],
    "graph": ["graph", "nn"],
    "server": ["server", "tool_parsers"],
    "training": ["trainer"],
    "contracts": ["contracts", "benchmarks"],
    "soak": ["soak"],
}
OPTIMISED = "optimised"
TIERS = {
    "test": "not exhaustive and not soak",
    "rest": "exhaustive and not soak",
    "all": "not soak",
    "soak": "soak or not soak",
}
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
PROGRESS = re.compile(r"[.sFExX]+ *\[ *\d+%\]$")
DURATION = re.compile(r"\d+\.\d+s (call|setup|teardown) ")  # of `--durations`
NO_TESTS = 5  # pytest's exit status if nothing was selected


class Batch(NamedTuple):
    """Test files that one process runs, and the options of pytest for them."""

    name: str
    files: Sequence[Path]
    options: Sequence[str]


class Outcome(NamedTuple):
    """How a batch ended: pytest's exit status, and its counts of tests by result."""

    status: int
    counts: Counter[str]


def test_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the test files among and below some paths."""
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("test_*.py"))
        else:
            yield path


def batch_of(file: Path) -> str:
    """Return the name of the batch that a test file belongs to.

    Raises:
      KeyError: no batch has the file's folder.
    """
    parts = file.relative_to(TESTS).parts
    folder = parts[0] if len(parts) > 1 else ""
    names = {folder: name for name, folders in FOLDERS.items() for folder in folders}
    return names[folder]


def planned_batches(paths: Sequence[Path], tier: str) -> list[Batch]:
    """Return the batches of a tier, for the test files at some paths."""
    files = list(test_files(paths))
    batches = []
    for name in FOLDERS:
        own = [file for file in files if batch_of(file) == name]
        if tier == "soak":
            batches.append(Batch(name, own, ["-m", TIERS[tier]]))
        elif name != "soak":
            options = ["-m", f"not {OPTIMISED} and {TIERS[tier]}", "--quick-compile"]
            batches.append(Batch(name, own, options))
    if tier != "soak":
        marked = [f for f in files if f"mark.{OPTIMISED}" in f.read_text(encoding="utf-8")]
        batches.append(Batch(OPTIMISED, marked, ["-m", f"{OPTIMISED} and {TIERS[tier]}"]))
    return [batch for batch in batches if batch.files]


class Runner:
    """Runs batches, and prints progress as it comes and failures when a batch ends.

    Args:
      options: further options of pytest for each batch.
    """

    def __init__(self, options: Sequence[str]):
        self._options = list(options)
        self._printing = threading.Lock()
        self._stopped = False

    def run(self, batches: Sequence[Batch], processes: int) -> list[Outcome]:
        """Run the batches in their order, `processes` at a time."""
        waiting = iter(batches)
        taking = threading.Lock()
        outcomes: list[Outcome] = []

        def work() -> None:
            while not self._stopped:
                with taking:
                    batch = next(waiting, None)
                if batch is None:
                    return
                outcomes.append(self._run(batch))

        threads = [threading.Thread(target=work) for _ in range(processes)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # the batches got it, too, and print what they have
            self._stopped = True
            for thread in threads:
                thread.join()
            raise
        return outcomes

    def _run(self, batch: Batch) -> Outcome:
        started = time.monotonic()
        files = [str(file.relative_to(ROOT)) for file in batch.files]
        command = [sys.executable, "-m", "pytest", *batch.options, *self._options, *files]
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        report = []
        assert process.stdout is not None
        for line in process.stdout:
            if PROGRESS.match(line.strip()) or DURATION.match(line):
                self._print(f"{batch.name:<10} {line.rstrip()}")
            else:
                report.append(line.rstrip())
        status = process.wait()
        counts = counts_of(report)
        seconds = time.monotonic() - started
        if status not in (0, NO_TESTS):
            self._print("\n".join([f"--- {batch.name} ---", *report]))
        self._print(f"{batch.name:<10} {in_words(counts)} in {seconds:.0f} s")
        return Outcome(status, counts)

    def _print(self, text: str) -> None:
        with self._printing:
            print(text, flush=True)


def counts_of(report: Sequence[str]) -> Counter[str]:
    """Return the counts in the last line of pytest's report that has any."""
    for line in reversed(report):
        counts = COUNTED.findall(line)
        if counts and " in " in line:
            return Counter({result.rstrip("s"): int(number) for number, result in counts})
    return Counter()


def in_words(counts: Counter[str]) -> str:
    """Return, for example, "12 passed, 0 failed, 3 skipped"; errors count as failures."""
    failed = counts["failed"] + counts["error"]
    return f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__.split("\n")[0])
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--rest", action="store_const", dest="tier", const="rest", default="test")
    tier.add_argument("--all", action="store_const", dest="tier", const="all")
    tier.add_argument("--soak", action="store_const", dest="tier", const="soak")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("paths", nargs="*", type=Path, default=[TESTS])
    chosen, options = parser.parse_known_args(arguments)
    missing = [path for path in chosen.paths if not path.exists()]
    if missing:
        parser.error(f"{missing[0]} does not exist")
    started = time.monotonic()
    batches = planned_batches([path.resolve() for path in chosen.paths], chosen.tier)
    try:
        outcomes = Runner(options).run(batches, chosen.processes)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = sum((outcome.counts for outcome in outcomes), Counter())
    wall = time.monotonic() - started
    print(f"{wall:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time")
    print(f"{chosen.tier}: {in_words(total)}")
    failures = [outcome.status for outcome in outcomes if outcome.status not in (0, NO_TESTS)]
    if not failures and not total["passed"]:
        print("no test ran")
        return NO_TESTS
    return max(failures, default=0)


if __name__ == "__main__":
    sys.exit(main())
