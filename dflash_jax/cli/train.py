"""`dflash-jax train`: trains a drafter for a target."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.cli.options import new_command, use_compilation_cache
from dflash_jax.errors import ConfigError, install_hint

STOPPED = 3  # exit code after a signal, once the state is saved


def add_command(commands: Any) -> None:
    """Add `train` to the command line."""
    command = new_command(
        commands,
        "train",
        run,
        "Train a drafter: the target answers your prompts, and the drafter learns to predict it."
        " The same command continues a run that was stopped.",
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the run")
    command.add_argument("--target", default="tiny", help="directory, .gguf file, hub id or 'tiny'")
    command.add_argument(
        "--data",
        default="tiny",
        help='JSONL of {"messages": [...]}, {"prompt": ...}, {"text": ...} or {"ids": [...]};'
        " 'self:N' has the target write N user turns itself; 'tiny' (default) is the corpus of the"
        " shipped pair; several with commas between them",
    )
    command.add_argument(
        "--preset",
        default="tiny-cpu",
        help="smoke (6 steps, to try it out); tiny-cpu (minutes; default), tiny-pair (as the"
        " shipped drafter), tiny-dflash2 (its twin of the other kind), tiny-h200; smollm2;"
        " qwen3-8b",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="change a setting of the preset: kind=dflash2, steps=900, loss=kl, weights=dpace ...",
    )
    command.add_argument(
        "--mask-id", type=int, help="id of the mask token, if it cannot be detected"
    )
    command.add_argument(
        "--from", dest="start", type=Path, help="drafter to start from; 'tiny' is the shipped one"
    )
    command.add_argument(
        "--reuse",
        type=Path,
        help="folder of another run of the same data: take its answers, and features that fit",
    )
    command.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="have the prompts answered by a Ray cluster, one worker per GPU: HOST:PORT, auto, or"
        " local to start one; the answers are the same",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax train`.

    Raises:
      ConfigError: the extra `train` is missing, or a setting is wrong.
      RequestError: the extra `ray` is missing, or no cluster answers.
    """
    try:
        import optax  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; {install_hint('train')}") from error
    use_compilation_cache()
    from dflash_jax.train import run as training
    from dflash_jax.train.beginning import begin
    from dflash_jax.train.evaluate import summary
    from dflash_jax.train.loop import TrainingStopped
    from dflash_jax.train.recipes import recipe

    chosen = recipe(options.preset, options.settings)
    started, decoder = time.monotonic(), None
    if options.ray:
        from dflash_jax import ray

        decoder = ray.decoder(options.ray, options.target, chosen)
    try:
        with progress() as report:
            begun = begin(
                options.target,
                options.data,
                options.out,
                chosen,
                report=report,
                mask_id=options.mask_id,
                start=options.start,
                data_of=options.reuse,
            )
            trained = training.finish(
                begun, options.target, options.out, chosen, report=report, decoder=decoder
            )
    except TrainingStopped as stop:
        print(f"dflash-jax: {stop}; run the same command to go on", file=sys.stderr)
        return STOPPED
    plotted, seconds = draw(options.out), round(time.monotonic() - started, 1)
    if options.json:
        summary_fields: dict[str, Any] = {
            "drafter": str(trained.drafter),
            "results": trained.results,
        }
        # Seconds of this call only, also if it continued a run.
        summary_fields |= {"plot": plotted, "seconds": seconds}
        print(json.dumps(summary_fields))
        return 0
    for kind, row in trained.results.items():
        if isinstance(row, dict):
            print(f"{kind}: {summary(row)}")
    print(f"written to {trained.drafter}" + (f", curves to {plotted}" if plotted else ""))
    return 0


def draw(out: Path) -> str | None:
    """Draw the curves of a run, and return the path; None without matplotlib or a log."""
    try:
        from dflash_jax.train import plots

        return str(plots.curves(out / "log.jsonl", out / "curves.png"))
    except ImportError:
        return None
    except (OSError, ValueError, LookupError) as error:
        print(f"dflash-jax: no curves were drawn ({error})", file=sys.stderr)
        return None


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress, as a bar on a terminal and as lines otherwise.

    Yields:
      A function that takes a line such as "step 20/900 loss 1.2".
    """
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def report(line: str) -> None:
            words = line.split()
            done, _, total = words[1].partition("/") if len(words) > 1 else ("", "", "")
            counted = done.isdigit() and total.isdigit()
            if counted:
                bar.update(task, completed=int(done), total=int(total), description=line)
            else:
                bar.console.print(line)

        yield report
