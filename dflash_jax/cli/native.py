"""`dflash-jax native`: finds the native kernels, or compiles them ahead of their first use."""

import argparse
from typing import Any

from dflash_jax.cli.options import new_command


def add_command(commands: Any) -> None:
    """Add `native` to the command line."""
    new_command(
        commands,
        "native",
        run,
        "Print the path of the native kernels for this machine's CPU. Where the package ships none,"
        " compile them, which otherwise happens when an engine first needs them.",
        check=lambda options: None,
    )


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax native`.

    Raises:
      NativeError: the kernels cannot be compiled or loaded.
    """
    from dflash_jax.errors import NativeError
    from dflash_jax.kernels.native.build import library

    found = library()
    if not found:
        raise NativeError(f"there are no native kernels: {found.reason}")
    print(found.path)
    return 0
