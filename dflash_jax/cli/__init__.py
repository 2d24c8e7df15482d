"""The command `dflash-jax`: one file per verb; the converters bring theirs along."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.allocator import tune_allocator
from dflash_jax.cli import bench, chat, explain, generate, probe, replay, serve, train, verify
from dflash_jax.cli.options import INTERRUPTED
from dflash_jax.errors import DFlashError
from dflash_jax.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the process's exit code."""
    tune_allocator()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
    _open_streams()
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except (DFlashError, OSError) as error:
        print(f"dflash-jax: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndflash-jax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _open_streams() -> None:
    """Standard streams that were closed are empty ones: Python makes them None."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="dflash-jax", description="DFlash speculative decoding in JAX, losslessly."
    )
    top.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    verbs = top.add_subparsers(required=True, metavar="VERB")
    for module in (generate, chat, serve, explain, bench, verify, replay, probe, train):
        module.add_verb(verbs)
    from converters.cli import add_verbs

    add_verbs(verbs)
    return top
