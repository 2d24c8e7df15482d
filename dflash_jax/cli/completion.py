"""`dflash-jax completion`: prints a script that completes the command line in a shell."""

import argparse
import importlib
from typing import Any

from dflash_jax.cli.options import new_command
from dflash_jax.errors import RequestError

SHELLS = ("bash", "zsh", "tcsh")
# Attributes set by options whose values are files or folders.
PATHS = {
    *("target", "drafter", "lora", "tokenizer", "source", "destination", "path", "first", "second"),
    *("out", "data", "start", "reuse", "plot", "trace", "prompts", "api_key_file", "prefix_folder"),
}


def add_command(commands: Any) -> None:
    """Add `completion` to the command line."""
    text = "Print a script that completes commands and options in a shell."
    command = new_command(commands, "completion", run, text)
    command.add_argument("shell", choices=SHELLS, help="the shell; see docs/cli.md")
    command.set_defaults(uses_jax=False)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax completion`.

    Raises:
      RequestError: the package `shtab` is missing.
    """
    from dflash_jax.cli import parser

    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        hint = "pip install shtab"
        raise RequestError(f"completion needs the package shtab; install it: {hint}") from error
    top = parser()
    [commands] = [x for x in top._actions if isinstance(x, argparse._SubParsersAction)]
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in PATHS and action.choices is None:
                setattr(action, "complete", shtab.FILE)  # noqa: B010, the attribute is shtab's
    print(shtab.complete(top, shell=options.shell))
    return 0
