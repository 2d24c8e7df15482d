"""Command lines of Python in another process."""

import sys


def python_command(*words: str) -> list[str]:
    """Return a command that runs a module ("-m" and its name) or a file by this Python.

    Every process that this package starts is started by it. With -P neither the current folder nor
    that of the file is searched for modules, so that no code that lies there runs.
    """
    return [sys.executable, "-P", *words]
