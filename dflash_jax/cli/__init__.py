"""The command line `dflash-jax`: a file per command; the converters add theirs.

What cannot be done is raised as one of `dflash_jax.errors`, of which one line is printed.
Imports are inside functions, so that Ctrl-C during an import ends the command without a traceback.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run one command and return the exit code.

    Args:
      arguments: command line arguments; `sys.argv[1:]` by default.
    """
    try:
        from dflash_jax.utils.command import exit_code, exit_quietly

        code = exit_code("dflash-jax", lambda: _run(arguments))
        if arguments is None:
            exit_quietly()
        return code
    except KeyboardInterrupt:  # before `exit_code` handles it, or after
        return 130


def _run(arguments: "Sequence[str] | None") -> int:
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.refuse(unknown)
    options.check(options)
    if options.uses_jax:
        prepare(options)
    return options.run(options)


def parser() -> "argparse.ArgumentParser":
    """Return the parser of the command line, with all commands."""
    import argparse

    from dflash_jax.cli import (
        bench,
        chat,
        compare_logits,
        explain,
        generate,
        imatrix,
        installation,
        probe,
        replay,
        serve,
        train,
        tune,
        verify,
    )  # fmt: skip
    from dflash_jax.cli.help import HIDDEN, CommandParser
    from dflash_jax.cli.options import check_values
    from dflash_jax.converters.cli import add_commands
    from dflash_jax.version import __version__

    top = argparse.ArgumentParser(
        prog="dflash-jax", description="DFlash speculative decoding in JAX, losslessly."
    )
    top.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    top.set_defaults(check=check_values, uses_jax=True)
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for module in (
        generate, chat, serve, explain, bench, tune, verify, replay, probe, train,
    ):  # fmt: skip
        module.add_command(commands)
    installation.add_native(commands)
    add_commands(commands)
    imatrix.add_command(commands)
    compare_logits.extend(commands.choices["compare"])
    installation.add_completion(commands)
    for name, command in commands.choices.items():
        if hidden := HIDDEN.get(name):
            command.hide(hidden)
        command.set_defaults(refuse=command.refuse)  # with the usage of the command
    return top


def prepare(options: "argparse.Namespace") -> None:
    """Import what the command needs; signals end the process without a traceback meanwhile."""
    import importlib

    from dflash_jax.utils.allocator import fewer_collections, tune_allocator
    from dflash_jax.utils.command import default_signals
    from dflash_jax.utils.progress import announced, is_shown

    engine = hasattr(options, "target")  # the commands about weight files have none
    if engine:
        tune_allocator()  # before JAX allocates
    with announced("importing JAX", shown=is_shown()), default_signals(), fewer_collections():
        importlib.import_module("dflash_jax.loading" if engine else "dflash_jax.converters.models")
