"""The commands of SmolLM2's drafters: `python -m recipes.smollm2 RUN data`, then `... RUN train`.

`data` has the target write and answer prompts, or takes the shipped ones, and records its features;
`compare` trains drafters of several shapes on them for a short time and writes a table; `train`
trains one of them in full. A stopped or killed command goes on when it is started again. `pack`
makes the archive of prompts and answers that is shipped, `ship` the folder of the shipped drafter.
"""

import argparse
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmarks
import dflash_jax
from dflash_jax.errors import ConfigError, DFlashError
from dflash_jax.graph.cache import enable_compilation_cache
from dflash_jax.trainer import run as training
from dflash_jax.trainer.files import saved_as, write_json
from dflash_jax.trainer.loop import TrainingStopped, to_stderr
from dflash_jax.trainer.recipes import Recipe, recipe
from dflash_jax.trainer.setup import ANSWERS, ROWS, data_files
from dflash_jax.trainer.sources import TrainingData
from dflash_jax.utils.allocator import tune_allocator
from recipes.smollm2 import card, comparison, short_runs

STOPPED = 3
DRAFT_TOKENS = 2  # drafts of a step by default: the fastest on a CPU (docs/benchmarks.md)
# Positions that the drafter sees: in longer texts it drafts better so (docs/experiments.md).
WINDOW = 256
# Folder of the archives of prompts and answers, one for each preset and round.
ARCHIVES = Path(__file__).parent
FOLDER = Path(dflash_jax.__file__).with_name("data") / "smollm2"
# The drafters of the comparison, each with its settings that differ from the preset's.
DRAFTERS: dict[str, tuple[str, ...]] = {
    "v1": (),
    "one-layer": ("layers=1",),
    "four-layers": ("layers=4",),
    "block-4": ("block=4",),
    "block-8": ("block=8",),
    "full-vocabulary": ("draft_vocab=0",),
    "dspark": ("kind=dspark", "confidence_head=false", "rank=32", "block=5"),
    "dflash2": ("kind=dflash2", "draft_vocab=0"),
}
# The kinds as which a v1 drafter can go on, compared where one is given to start from.
KINDS: dict[str, tuple[str, ...]] = {
    "v1": (),
    "dspark": ("kind=dspark", "confidence_head=false", "rank=32", "sample_from_anchor=false"),
    "dflash2": ("kind=dflash2",),
    "domino": ("kind=domino", "rank=32", "sample_from_anchor=false"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when done, 2 for an error that has a name, 3 after a signal."""
    options = parser().parse_args(arguments)
    tune_allocator()
    enable_compilation_cache(options.run / "programs")
    try:
        options.command(options)
    except TrainingStopped as stop:
        to_stderr(f"{stop}; run the same command to go on")
        return STOPPED
    except DFlashError as error:
        to_stderr(f"error: {error}")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m recipes.smollm2", description=__doc__)
    made.add_argument("run", type=Path, help="folder of the data and of a run for each drafter")
    made.add_argument("--target", default="smollm2", help="another target, for tests")
    made.add_argument("--preset", default="smollm2")
    made.add_argument("--turns", type=int, help="user turns that the target writes")
    made.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for function, text in (
        (data, "have the target write and answer prompts, and record its features"),
        (compare, "train drafters of several shapes for a short time, and write table.json"),
        (train, "train a drafter on the data"),
        (short, "train a drafter with a change of the recipe, and compare it with a control"),
        (pack, "pack the prompts and answers into an archive"),
        (ship, "put a trained drafter into the package, with its card"),
    ):
        command = commands.add_parser(function.__name__, help=text, description=text)
        command.set_defaults(command=function)
        if function is data:
            command.add_argument("--shipped", action="store_true", help="take the shipped answers")
        if function is compare:
            names = tuple(dict.fromkeys((*DRAFTERS, *KINDS)))
            command.add_argument("--only", nargs="+", choices=names)
        if function is pack:
            command.add_argument("--archive", type=Path, help="by default the shipped one")
        if function in (train, ship):
            command.add_argument("--only", choices=tuple(DRAFTERS), default="v1")
        if function in (compare, train):
            text = "folder of a drafter to start from, of the recipe's shape"
            command.add_argument("--start", type=Path, help=text)
        if function is short:
            names = (short_runs.START, *short_runs.SHORT)
            command.add_argument("name", choices=names)
            text = "folder of the drafter that all runs go on from"
            command.add_argument("--start", type=Path, default=FOLDER / "drafter", help=text)
            text = "conversations of each category that are answered"
            command.add_argument("--count", type=int, default=10, help=text)
            text = (
                "the first round whose rows are learnt: 3 for the text that no drafter has learnt"
            )
            command.add_argument("--first-round", type=int, default=0, metavar="N", help=text)
            text = "train on every N-th row only, so that the target's pass over them is short"
            command.add_argument("--every", type=int, default=1, metavar="N", help=text)
        if function is ship:
            command.add_argument("--draft-tokens", type=int, default=DRAFT_TOKENS)
            command.add_argument("--window", type=int, default=WINDOW)
            command.add_argument("--folder", type=Path, default=FOLDER)
    return made


def data(options: argparse.Namespace) -> None:
    folder = options.run / "data"
    chosen = chosen_recipe(options)
    if options.shipped and not folder.exists():
        unpack(ARCHIVES / archive_name(chosen), folder)
    training.prepare(options.target, source(chosen), folder, chosen, report=to_stderr)


def source(chosen: Recipe) -> TrainingData:
    """Return the data that the target has yet to write, unlike the evaluation's if mixed."""
    avoided: list[str] = []
    if chosen.mixture:
        folder = Path(benchmarks.__file__).parent
        lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        for line in lines:
            avoided += json.loads(line)["turns"]
        avoided += (folder / "heldout_english.txt").read_text(encoding="utf-8").split("\n\n")
    return TrainingData(self_written=chosen.prompts, avoided=tuple(avoided))


def compare(options: argparse.Namespace) -> None:
    """Train the chosen drafters for a short time, one after another, and time their steps."""
    if options.start:
        drafters = KINDS
        folder = "kinds"
        file = "kinds.json"
    else:
        drafters = DRAFTERS
        folder = "short"
        file = "table.json"
    unknown = [name for name in options.only or () if name not in drafters]
    if unknown:
        how = "with" if options.start else "without"
        raise ConfigError(f"{', '.join(unknown)}: {how} --start, one of {', '.join(drafters)}")
    settings = {name: drafters[name] for name in options.only or drafters}
    runs = {name: options.run / folder / name for name in settings}
    for name, own in settings.items():
        trained_drafter(options, runs[name], (*own, *comparison.SETTINGS), options.start)
    rows = {name: comparison.row(run, DRAFT_TOKENS) for name, run in runs.items()}
    table = comparison.table(rows, comparison.timed(options.target, runs, DRAFT_TOKENS))
    with saved_as(options.run / file) as partial:
        write_json(partial, table)
    for line in comparison.lines(table, settings):
        to_stderr(line)


def train(options: argparse.Namespace) -> None:
    out = options.run / options.only
    trained_drafter(options, out, DRAFTERS[options.only], options.start)


def trained_drafter(
    options: argparse.Namespace, out: Path, settings: Sequence[str], start: Path | None = None
) -> None:
    """Train and measure a drafter whose settings differ from the preset's.

    Args:
      start: another drafter, by default layers of the target.
    """
    to_stderr(f"-- {out.name} {' '.join(settings)}")
    chosen = chosen_recipe(options, settings)
    training.run(
        options.target,
        source(chosen),
        out,
        chosen,
        report=to_stderr,
        start=start,
        data_of=options.run / "data",
    )


def short(options: argparse.Namespace) -> None:
    """Train the named drafter, answer the prompts, and write the table of all runs."""
    if options.every < 1:
        raise ConfigError(f"--every is {options.every}; expected at least 1")
    if options.first_round < 0:
        raise ConfigError(f"--first-round is {options.first_round}; expected at least 0")
    runs = short_runs.ShortRuns(
        folder=options.run,
        target=options.target,
        start=options.start,
        rounds=tuple(unpacked_rounds(options)),
        count=options.count,
        report=to_stderr,
        every=options.every,
    )
    cases = runs.cases(source)
    chosen = chosen_recipe(options, short_runs.settings(options.name))
    runs.measure(options.name, chosen, cases)
    table = runs.table(cases)
    with saved_as(options.run / "table.json") as partial:
        write_json(partial, table)
    for line in short_runs.lines(table):
        to_stderr(line)


def unpacked_rounds(options: argparse.Namespace) -> Iterator[Recipe]:
    """Yield the recipe of each round whose data are there or shipped, from the chosen one on.

    Raises:
      ConfigError: there is none.
    """
    first = options.first_round
    for seed in itertools.count(first):
        chosen = recipe(options.preset, [*of_data(options), *options.settings, f"seed={seed}"])
        folder = short_runs.data_folder(options.run, chosen)
        if not folder.exists():
            if seed > first and not (ARCHIVES / archive_name(chosen)).is_file():
                return
            unpack(ARCHIVES / archive_name(chosen), folder)
        yield chosen


def pack(options: argparse.Namespace) -> None:
    """Pack everything that decides the rows, which are made again from it."""
    folder = options.run / "data"
    names = ["run.json", *data_files(folder)]
    missing = {ANSWERS, ROWS} - set(names)
    if missing:
        raise ConfigError(f"{folder} has no {', '.join(sorted(missing))}; run `data` first")
    archive = options.archive or ARCHIVES / archive_name(chosen_recipe(options))
    with saved_as(archive) as partial, tarfile.open(partial, "w:xz") as packed:
        for name in names:
            packed.add(folder / name, name, filter=anonymous)


def archive_name(chosen: Recipe) -> str:
    """Return the name of the shipped archive of a preset; rounds after the first have a number."""
    number = f"-{chosen.seed}" if chosen.seed else ""
    return f"{chosen.name}{number}.tar.xz"


def ship(options: argparse.Namespace) -> None:
    """Put a trained drafter into the folder of the package."""
    chosen = chosen_recipe(options, DRAFTERS[options.only])
    run = options.run / options.only
    if not (run / "results.json").is_file():
        raise ConfigError(f"{run} has no trained and measured drafter; run `train` first")
    card.ship(run, options.folder, chosen, draft_tokens=options.draft_tokens, window=options.window)


def unpack(archive: Path, folder: Path) -> None:
    """Make the folder of a run from an archive that `pack` made.

    Raises:
      ConfigError: there is none.
    """
    if not archive.is_file():
        raise ConfigError(f"there is no {archive.name}; run `data` without --shipped")
    with saved_as(folder, folder=True) as partial, tarfile.open(archive) as packed:
        packed.extractall(partial, filter="data")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive without owner and time, so that archives are repeatable."""
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, mode=0o644, deep=False)


def chosen_recipe(options: argparse.Namespace, of_drafter: Sequence[str] = ()) -> Recipe:
    """Return the recipe of the data, or of a drafter."""
    return recipe(options.preset, [*of_data(options), *of_drafter, *options.settings])


def of_data(options: argparse.Namespace) -> list[str]:
    """Return the settings of options that have an argument of their own."""
    return [] if options.turns is None else [f"prompts={options.turns}"]


if __name__ == "__main__":
    sys.exit(main())
