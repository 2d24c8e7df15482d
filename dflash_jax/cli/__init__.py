"""The command `dflash-jax`: one file per verb; the converters bring theirs along.

Imports are inside functions, so that a Ctrl-C in the middle of one ends the command in order.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run one verb and return the process's exit code.

    Args:
      arguments: the process's own by default.
    """
    try:
        from dflash_jax.utils.command import end_silently, exit_code

        code = exit_code("dflash-jax", lambda: _run(arguments))
        if arguments is None:
            end_silently()
        return code
    except KeyboardInterrupt:  # just before `exit_code` takes care of it, or just after
        return 130


def _run(arguments: "Sequence[str] | None") -> int:
    options = parser().parse_args(arguments)
    options.check(options)
    prepare(options)
    return options.run(options)


def parser() -> "argparse.ArgumentParser":
    """The whole command line."""
    import argparse

    from dflash_jax.cli import bench, chat, explain, generate, probe, replay, serve, train, verify
    from dflash_jax.cli.options import check_values
    from dflash_jax.converters.cli import add_verbs
    from dflash_jax.version import __version__

    top = argparse.ArgumentParser(
        prog="dflash-jax", description="DFlash speculative decoding in JAX, losslessly."
    )
    top.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    top.set_defaults(check=check_values)
    verbs = top.add_subparsers(required=True, metavar="VERB")
    for module in (generate, chat, serve, explain, bench, verify, replay, probe, train):
        module.add_verb(verbs)
    add_verbs(verbs)
    return top


def prepare(options: "argparse.Namespace") -> None:
    """Import what the verb needs; a signal meanwhile ends the process without a traceback."""
    import importlib

    from dflash_jax.utils.allocator import fewer_collections, tune_allocator
    from dflash_jax.utils.command import abrupt
    from dflash_jax.utils.progress import announced, is_shown

    tune_allocator()  # before JAX allocates
    with announced("importing JAX", shown=is_shown()), abrupt(), fewer_collections():
        engine = hasattr(options, "target")  # the verbs about weight files have none
        importlib.import_module("dflash_jax.loading" if engine else "dflash_jax.converters.models")
