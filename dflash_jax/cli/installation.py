"""Commands about the installation: `dflash-jax native` and `dflash-jax completion`."""

import argparse
import importlib
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import NativeError, RequestError

SHELLS = ("bash", "zsh", "tcsh")
# Attributes set by options whose values are files or folders.
PATHS = {
    *("target", "drafter", "lora", "tokenizer", "source", "destination", "path", "first", "second"),
    *("out", "data", "start", "reuse", "plot", "trace", "prompts"),
    *("config", "api_key_file", "prefix_folder"),
}


def add_native(commands: Any) -> None:
    """Add `native` to the command line."""
    text = (
        "Print the path of the native kernels for this machine's CPU. Where the package ships none,"
        " compile them, which otherwise happens when an engine first needs them."
    )
    shared.new_command(commands, "native", print_kernels, text, check=lambda options: None)


def add_completion(commands: Any) -> None:
    """Add `completion` to the command line."""
    text = "Print a script that completes commands and options in a shell."
    command = shared.new_command(commands, "completion", print_completion, text)
    command.add_argument("shell", choices=SHELLS, help="the shell; see docs/cli.md")
    command.set_defaults(uses_jax=False)


def print_kernels(options: argparse.Namespace) -> int:
    """Run `dflash-jax native`."""
    from dflash_jax.kernels.native.build import library

    kernels = library()
    if not kernels:
        raise NativeError(f"there are no native kernels: {kernels.reason}")
    print(kernels.path)
    return 0


def print_completion(options: argparse.Namespace) -> int:
    """Run `dflash-jax completion`."""
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
