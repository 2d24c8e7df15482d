"""The command `dflash-jax`: one file per verb; the converters bring theirs along."""

import argparse
from collections.abc import Sequence

from dflash_jax.allocator import tune_allocator
from dflash_jax.cli import bench, chat, explain, generate, probe, replay, serve, train, verify
from dflash_jax.command import exit_code
from dflash_jax.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the process's exit code."""
    tune_allocator()

    def run() -> int:
        options = parser().parse_args(arguments)
        return options.run(options)

    return exit_code("dflash-jax", run)


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
