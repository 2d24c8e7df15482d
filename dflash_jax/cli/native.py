"""`dflash-jax native`: compiles the native kernels ahead of their first use."""

import argparse
from typing import Any

from dflash_jax.cli.options import new_command


def add_command(commands: Any) -> None:
    """Add `native` to the command line."""
    new_command(
        commands,
        "native",
        run,
        "Compile the native kernels of this machine's CPU, which are otherwise compiled when an"
        " engine first needs them, and print the path of the library.",
        check=lambda options: None,
    )


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax native`.

    Raises:
      NativeError: the kernels cannot be compiled or loaded.
    """
    from dflash_jax.errors import NativeError
    from dflash_jax.native.build import library

    found = library()
    if not found:
        raise NativeError(f"there are no native kernels: {found.reason}")
    print(found.path)
    return 0
