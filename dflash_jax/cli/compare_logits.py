"""`dflash-jax compare --logits`: next-token probabilities of two models beside their tensors."""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError

MOST_TOKENS = 512


def extend(command: argparse.ArgumentParser) -> None:
    """Add the options to the command `compare` of the converters."""
    tensors = command.get_default("run")
    command.add_argument(
        "--logits",
        type=Path,
        metavar="PROMPTS",
        help="also compare next-token probabilities, on the texts of a file, one on each line",
    )
    command.add_argument(
        "--max-tokens",
        type=int,
        default=MOST_TOKENS,
        metavar="N",
        help=f"for --logits: tokens of a text that are read (default {MOST_TOKENS})",
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="for --logits: draw the divergences"
    )
    command.set_defaults(check=check, run=lambda options: run(options, tensors))


def check(options: argparse.Namespace) -> None:
    """Check the options before models are opened."""
    shared.check_values(options)
    if options.logits is None:
        if options.plot is not None:
            raise RequestError("--plot draws divergences; add --logits PROMPTS")
        return
    if options.max_tokens < 2:
        raise RequestError(f"--max-tokens is {options.max_tokens}; expected at least 2")
    options.texts = texts_of(options.logits)  # read once: it may be a pipe


def texts_of(path: Path) -> list[str]:
    """Return the texts of a file, one on each line.

    Raises:
      RequestError: it cannot be read, or has none.
    """
    try:
        listed = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    texts = [line for line in listed if line.strip()]
    if not texts:
        raise RequestError(f"{path} holds no prompt; write one on each line")
    return texts


def run(options: argparse.Namespace, tensors: Callable[[argparse.Namespace], int]) -> int:
    """Run `dflash-jax compare`; the exit code is that of the tensors' comparison."""
    if options.logits is None:
        return tensors(options)
    from dflash_jax.bench import logits
    from dflash_jax.bench.report import check_plot
    from dflash_jax.converters.cli import CHECK_FAILED, comparison
    from dflash_jax.converters.command_parts import print_report
    from dflash_jax.utils.atomic import new_path

    drawn: contextlib.AbstractContextManager[Path | None] = contextlib.nullcontext()
    kind = ""
    if options.plot is not None:
        check_plot(options.plot)
        kind = options.plot.suffix.removeprefix(".")
        drawn = new_path(options.plot, overwrite=True)
    with drawn as place:
        report, lines = comparison(options)
        distances = logits.distances(
            options.first,
            options.second,
            options.texts,
            most_tokens=options.max_tokens,
        )
        report |= {"logits": logits.summary(distances)}
        if place is not None:
            logits.plot(distances, place, kind)
    print_report(options, report, [*lines, *logits.lines(report["logits"])])
    return 0 if report["agree"] else CHECK_FAILED
