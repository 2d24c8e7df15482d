"""Standard output carries a command's result; notes about it go to standard error."""

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

USUAL = 80  # columns where there is no terminal
FEWEST = 20
_JOINED = "\N{NO-BREAK SPACE}"  # `textwrap` breaks lines at other spaces alone


def note(text: str, *, end: str = "\n") -> None:
    """Print to standard error, after what was printed to standard output so far."""
    sys.stdout.flush()
    print(text, end=end, file=sys.stderr, flush=True)


def columns(stream: Any) -> int:
    """Return the width of the terminal that a stream writes to; COLUMNS, if set, wins."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given):
        return max(int(given), FEWEST)
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or no file at all
        return USUAL
    return max(found, FEWEST) if found else USUAL


def bracketed(parts: Iterable[str], width: int) -> str:
    """Return "[a | b | c]" in lines of at most `width` characters, broken between parts.

    A part that is longer than a line is broken at its spaces.
    """
    room = width - len("[ |]")
    kept = [part.replace(" ", _JOINED) if len(part) <= room else part for part in parts]
    text = "[" + f"{_JOINED}| ".join(kept) + "]"
    lines = textwrap.wrap(text, width, subsequent_indent=" ", break_on_hyphens=False)
    return "\n".join(lines).replace(_JOINED, " ")
