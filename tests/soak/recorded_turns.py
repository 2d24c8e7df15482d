"""Record scenarios of the audit, and run them again in another process: all turns are equal.

    python -m tests.soak.recorded_turns --turns 20000

The other process has another PYTHONHASHSEED. Scenarios cancel, drop and retry requests, fail steps,
and change the steps of a call and the break-even. Turns after a step that failed, and of engines
with a prefix folder or another drafter, are not recorded.
"""

import argparse
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dflash_jax as dj
from benchmarks.audit.models import SHIPPED, AuditedEngine, build, draw_setup
from benchmarks.audit.runner import run_case
from benchmarks.audit.scenario import draw_scenario
from dflash_jax.bench.recorded_turns import TurnRecording, replay
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.turns.recording import record_turns
from dflash_jax.graph import Graph

CASES = 40  # per setup, whose compilation takes a while


@dataclasses.dataclass(frozen=True)
class RecordedEngine(AuditedEngine):
    """An audited engine that records the turns of each engine that it opens."""

    recordings: Path

    def opened(
        self, *, segments: int = 0, folder: Path | None = None, drafter_seed: int | None = None
    ) -> Engine:
        """Return another engine, as an audited one does."""
        made = super().opened(segments=segments, folder=folder, drafter_seed=drafter_seed)
        if folder is None and drafter_seed is None:
            count = len(list(self.recordings.iterdir()))
            record_turns(made, self.recordings / f"{count}.jsonl")
        return made


def record(folder: Path, turns: int, seed: int) -> int:
    """Record so many turns to files of a folder, or some more; return how many.

    Raises:
      AssertionError: an answer differs from that of its request alone.
    """
    recorded = 0
    for number in itertools.count():
        audited = build(draw_setup(seed, number, family=SHIPPED))
        engine = RecordedEngine(audited.setup, audited.engine, audited.limits, folder)
        for case in range(number * CASES, (number + 1) * CASES):
            differences, counts = run_case(engine, draw_scenario(seed, case, engine.limits))
            assert not differences, f"case {case}: {differences}"
            recorded += counts["turns"]
            if recorded >= turns:
                return recorded
    raise AssertionError("unreachable")


def replay_all(folder: Path) -> int:
    """Run the recordings of a folder again; return how many turns these are.

    Raises:
      AssertionError: a turn differs.
    """
    turns = 0
    engines: dict[str, Engine] = {}  # with programs, by shape of the plan
    for path in sorted(folder.iterdir()):
        recording = TurnRecording(path)
        plan = recording.plan
        first = engines.get(str(plan.shape))
        if first is None:
            first = engines[str(plan.shape)] = dj.load("tiny", plan=plan)
        engine = Engine(Graph(first.graph.pair, plan), first.params, tokenizer=first.tokenizer)
        engine.share_programs(first)
        replayed = replay(engine, recording)
        assert not replayed.difference, f"{path}: {replayed.difference}"
        turns += replayed.turns
    return turns


def run(turns: int, seed: int = 0) -> int:
    """Record turns, and run them again in another process; return how many were equal.

    Raises:
      AssertionError: a turn, or an answer, differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), turns, seed)
        again = subprocess.run(
            [sys.executable, "-m", "tests.soak.recorded_turns", "--replay", folder],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "7"},
        )
    assert again.returncode == 0, again.stderr
    return int(again.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many turns were equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="of recordings")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        print(replay_all(options.replay))
    else:
        print(f"{run(options.turns, options.seed):,} turns are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
