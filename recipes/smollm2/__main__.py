"""The command that trains drafters for SmolLM2: `python -m recipes.smollm2 RUN`.

The first drafter's run writes, answers and records the data; the others reuse them. A stopped or
killed command goes on when it is started again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.compiler import enable_compilation_cache
from dflash_jax.errors import DFlashError
from dflash_jax.train import run as training
from dflash_jax.train.files import saved_as, write_json
from dflash_jax.train.loop import TrainingStopped, to_stderr
from dflash_jax.train.recipes import recipe
from dflash_jax.utils.allocator import tune_allocator

STOPPED = 3
# The drafters of the comparison: what differs from the preset. The first one makes the data.
DRAFTERS: dict[str, tuple[str, ...]] = {
    "v1": (),
    "one-layer": ("layers=1",),
    "reduced": ("draft_vocab=8192",),
    "dflash2": ("kind=dflash2",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when done, 2 for an error that has a name, 3 after a signal."""
    options = parser().parse_args(arguments)
    tune_allocator()
    enable_compilation_cache(options.run / "programs")
    try:
        train(options)
    except TrainingStopped as stop:
        to_stderr(f"{stop}; run the same command to go on")
        return STOPPED
    except DFlashError as error:
        to_stderr(f"error: {error}")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m recipes.smollm2", description=__doc__)
    made.add_argument("run", type=Path, help="folder of the runs, one per drafter")
    made.add_argument("--target", default="smollm2", help="another target, for tests")
    made.add_argument("--preset", default="smollm2")
    made.add_argument("--turns", type=int, default=20_000, help="user turns that the target writes")
    made.add_argument("--only", nargs="+", choices=tuple(DRAFTERS), default=tuple(DRAFTERS))
    made.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    return made


def train(options: argparse.Namespace) -> None:
    """Train the chosen drafters one after another, and write their figures to `table.json`."""
    first, table = next(iter(DRAFTERS)), {}
    for name in options.only:
        settings = [f"prompts={options.turns}", *DRAFTERS[name], *options.settings]
        to_stderr(f"-- {name} {' '.join(DRAFTERS[name])}")
        trained = training.run(
            options.target,
            f"self:{options.turns}",
            options.run / name,
            recipe(options.preset, settings),
            report=to_stderr,
            data_of=None if name == first else options.run / first,
        )
        table[name] = figures(trained.results)
        with saved_as(options.run / "table.json") as partial:
            write_json(partial, table)


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """Return acceptance length and prompts of each kind of held-out prompt."""
    rows = {kind: row for kind, row in results.items() if isinstance(row, dict)}
    return {
        kind: {"acceptance_length": row["acceptance_length"], "prompts": row["prompts"]}
        for kind, row in rows.items()
    }


if __name__ == "__main__":
    sys.exit(main())
