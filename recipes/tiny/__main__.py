"""The command that makes the shipped pair: `python -m recipes.tiny --out DIR`.

Each stage leaves one result behind and is skipped where that exists; training stages save
their state and go on from it. A stopped command is started again as it was.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_jax.errors import DFlashError
from dflash_jax.trainer.files import claim, write_json
from dflash_jax.trainer.loop import TrainingStopped, to_stderr
from dflash_jax.utils.allocator import tune_allocator
from recipes.tiny import stages
from recipes.tiny.presets import PRESETS, Preset, preset

STAGES: dict[str, Callable[[stages.Work], None]] = {
    "corpus": stages.corpus,
    "tokenizer": stages.tokenizer,
    "target": stages.target,
    "answers": stages.answers,
    "drafter": stages.drafter_model,
    "heldout": stages.held_out,
    "evaluation": stages.evaluation,
    "result": stages.result,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when done or cleanly stopped, 2 for an error that has a name."""
    options = parser().parse_args(arguments)
    tune_allocator()
    try:
        run(options.out, preset(options.preset), options.stage)
    except TrainingStopped as stop:
        to_stderr(f"{stop}; run the same command to go on")
    except DFlashError as error:
        to_stderr(f"error: {error}")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m recipes.tiny", description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="folder for stages and result")
    made.add_argument("--preset", default="tiny-cpu", choices=tuple(PRESETS))
    made.add_argument("--stage", choices=tuple(STAGES), help="stop after this stage")
    return made


def run(out: Path, chosen: Preset, last: str | None = None) -> None:
    """Run all stages up to `last`, and write the seconds of each to timings.json.

    Raises:
      ConfigError: the folder was begun with another preset.
    """
    claim(out, "preset.json", dataclasses.asdict(chosen))
    work = stages.Work(out, chosen, to_stderr)
    for name, stage in STAGES.items():
        started = time.monotonic()
        if not (out / stages.RESULT[name]).exists():
            to_stderr(f"[{name}]")
            stage(work)
            note_time(out, name, time.monotonic() - started)
        if name == last:
            break


def note_time(out: Path, stage: str, seconds: float) -> None:
    """Add a stage's seconds to timings.json; a resumed stage adds to what it took before."""
    path = out / "timings.json"
    timings = {}
    if path.is_file():
        timings = json.loads(path.read_text(encoding="utf-8"))
    timings[stage] = round(timings.get(stage, 0.0) + seconds, 1)
    write_json(path, timings)


if __name__ == "__main__":
    sys.exit(main())
