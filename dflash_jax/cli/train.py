"""`dflash-jax train`: trains a drafter for a target."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import ConfigError, install_hint


def add_command(commands: Any) -> None:
    """Add `train` to the command line."""
    command = shared.new_command(
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
        help="smoke (6 steps, to try it out); for the target tiny: tiny-cpu (minutes; default),"
        " tiny-pair (as the shipped drafter), tiny-dflash2 (its twin of the other kind), tiny-h200;"
        " for others: one-night (a small target on a processor; default), smollm2, smollm2-mixture,"
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
        "--budget",
        metavar="TIME",
        help="time that the run may take, such as 3h or 90min, answers included: as many of the"
        " preset's steps are made as fit in it (the same as --set budget=TIME)",
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
        help="have the prompts answered by a Ray cluster, one worker per GPU, and --hosts placed on"
        " it: HOST:PORT, auto, or local to start one; the answers are the same",
    )
    command.add_argument("--only-answers", action="store_true", help=argparse.SUPPRESS)
    host_options(command)
    command.add_argument("--json", action="store_true", help="print one JSON object at the end")


def host_options(command: Any) -> None:
    """Add the options of a run on several hosts."""
    command.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="train by N processes, each with its share of `devices` and of every batch: on this"
        " machine, on a cluster by --ray, or by hand with --host and --coordinator on several",
    )
    command.add_argument(
        "--host", type=int, metavar="I", help="which of the hosts this process is, from 0"
    )
    command.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of host 0, in a network that you trust"
    )
    command.add_argument(
        "--host-wait",
        type=float,
        metavar="SECONDS",
        help="time for all hosts to start (default: 300)",
    )
    command.add_argument("--local-hosts", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax train`."""
    try:
        import optax  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; {install_hint('train')}") from error
    shared.use_compilation_cache()
    from dflash_jax.distributed import STOPPED
    from dflash_jax.trainer.evaluate import summary
    from dflash_jax.trainer.loop import PICTURE, TrainingStopped
    from dflash_jax.trainer.recipes import recipe
    from dflash_jax.trainer.training_hosts import ADVICE

    options.preset = options.preset or default_preset(options.target)
    if options.budget:
        options.settings.append(f"budget={options.budget}")
    chosen = recipe(options.preset, options.settings)
    started = time.monotonic()
    if options.ray and options.hosts > 1 and options.host is None:
        return train_on_cluster(options, chosen)
    try:
        with among_hosts(options, chosen):
            trained = train(options, chosen)
    except TrainingStopped as stop:
        print(f"dflash-jax: {stop}; {ADVICE}", file=sys.stderr)
        return STOPPED
    if options.host or options.only_answers:
        return 0
    picture = options.out / PICTURE
    if options.json:
        outcome: dict[str, Any] = {
            "drafter": str(trained.drafter),
            "results": trained.results,
            "plot": str(picture) if picture.is_file() else None,
            # Seconds of this call only, also if it continued a run.
            "seconds": round(time.monotonic() - started, 1),
        }
        print(json.dumps(outcome))
        return 0
    for kind, row in trained.results.items():
        if isinstance(row, dict):
            print(f"{kind}: {summary(row)}")
    print(f"written to {trained.drafter}, its curves to {picture}")
    return 0


def default_preset(target: str) -> str:
    """Return the preset for a target where none is given."""
    return "tiny-cpu" if target == "tiny" else "one-night"


def train(options: argparse.Namespace, recipe: Any) -> Any:
    """Return the outcome of a run; only host 0 reports progress."""
    from dflash_jax import distributed
    from dflash_jax.trainer import run as training
    from dflash_jax.trainer.files import unless_refused
    from dflash_jax.trainer.setup import RUN, begin
    from dflash_jax.trainer.training import Placement

    first = distributed.current().first
    decoder = None
    if options.ray and first:
        from dflash_jax import ray

        decoder = ray.decoder(options.ray, options.target, recipe)
    if not options.only_answers:
        Placement(recipe.devices)  # fails before the target answers for hours
    with (
        progress() if first else contextlib.nullcontext(lambda line: None) as report,
        unless_refused(options.out, RUN) if first else contextlib.nullcontext(),
    ):
        begun = begin(
            options.target,
            options.data,
            options.out,
            recipe,
            report=report,
            mask_id=options.mask_id,
            start=options.start,
            data_of=options.reuse,
        )
        if options.only_answers:
            return training.answered_rows(begun, decoder=decoder)
        return training.finish(begun, decoder=decoder)


def among_hosts(options: argparse.Namespace, recipe: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this process is one of the hosts of a run, if there are several."""
    count = options.hosts
    host = options.host
    if count < 1:
        raise ConfigError(f"--hosts is {count}; expected at least 1")
    if (host is None) != (options.coordinator is None):
        raise ConfigError(
            "--host and --coordinator go together: which host this is, and the address of host 0;"
            " without both, --hosts starts all processes on this machine"
        )
    if host is not None and not 0 <= host < count:
        raise ConfigError(f"--host is {host} of --hosts {count}; expected 0 to {count - 1}")
    if options.host_wait is not None and options.host_wait <= 0:
        raise ConfigError(f"--host-wait is {options.host_wait}; expected a positive number")
    if count == 1:
        return contextlib.nullcontext()
    from dflash_jax.distributed import WAIT_S, HostPlace
    from dflash_jax.trainer import training_hosts
    from dflash_jax.utils.addresses import free_address, split_address

    if options.coordinator is not None:
        try:
            split_address(options.coordinator)
        except ValueError as error:
            raise ConfigError(f"--coordinator is {error}") from None
    place = HostPlace(
        host or 0,
        count,
        options.coordinator or free_address(),
        devices=devices_of_each(recipe, count),
        wait=options.host_wait or WAIT_S,
        local=options.local_hosts or options.coordinator is None,
    )
    command = [*same_command(options), "--hosts", str(count), "--local-hosts"]
    others = () if options.coordinator else command
    return training_hosts.joined(place, recipe_settings(recipe), others)


def devices_of_each(recipe: Any, hosts: int) -> int:
    """Return the devices of each host."""
    each, rest = divmod(recipe.devices, hosts)
    if rest:
        raise ConfigError(
            f"devices is {recipe.devices} for {hosts} hosts; expected a multiple of the hosts, as"
            f" with --set devices={hosts * (each + 1)}"
        )
    return each


def train_on_cluster(options: argparse.Namespace, recipe: Any) -> int:
    """Train by hosts that a Ray cluster places, show what host 0 prints, return its exit code."""
    from dflash_jax import ray

    if options.coordinator:
        raise ConfigError("--ray places the hosts itself; leave out --coordinator")
    each = devices_of_each(recipe, options.hosts)
    words = same_command(options)
    if options.json:
        words.append("--json")
    with progress() as report:

        def show(stream: str, line: str) -> None:
            if stream == "stdout":
                print(line, flush=True)
            else:
                report(line)

        return ray.train(options.ray, words, hosts=options.hosts, devices=each, show=show)


def recipe_settings(recipe: Any) -> dict[str, Any]:
    """Return the settings of a recipe as JSON values, by which hosts compare theirs."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def same_command(options: argparse.Namespace) -> list[str]:
    """Return the words that start another host, without its number and address.

    Paths that exist are absolute: the other process may be in another folder.
    """
    words = ["train", "--out", str(options.out.absolute()), "--preset", options.preset]
    words += ["--target", absolute(options.target)]
    words += ["--data", ",".join(absolute(part) for part in options.data.split(","))]
    for setting in options.settings:
        words += ["--set", setting]
    for name, flag in (("start", "--from"), ("reuse", "--reuse")):
        if (path := getattr(options, name)) is not None:
            words += [flag, absolute(str(path))]
    for name in ("mask_id", "host_wait"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def absolute(source: str) -> str:
    """Return a source, as an absolute path if it is one."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() else source


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
