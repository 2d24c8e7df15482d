"""Text output of commands: results go to standard output, notes to standard error."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

USUAL = 80  # columns without a terminal
FEWEST = 20
_KEPT = "\N{NO-BREAK SPACE}"  # `textwrap` does not break lines here


def note(text: str, *, end: str = "\n") -> None:
    """Print to standard error, after flushing standard output."""
    sys.stdout.flush()
    print(text, end=end, file=sys.stderr, flush=True)


def has_colours() -> bool:
    """Return whether standard output is a terminal with colours; NO_COLOR turns them off."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def columns(stream: Any) -> int:
    """Return the width of a stream's terminal; the variable COLUMNS takes precedence."""
    variable = os.environ.get("COLUMNS", "")
    if variable.isascii() and variable.isdigit() and int(variable):
        return max(int(variable), FEWEST)
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # not a terminal, or not a file
        return USUAL
    return max(width, FEWEST) if width else USUAL


def bracketed(parts: Iterable[str], width: int) -> str:
    """Return "[a | b | c]" in lines of at most `width` characters, broken between parts."""
    text = list(parts)
    text[0] = "[" + text[0]
    text[-1] += "]"
    return filled(text, " |", width, indent=" ")


def filled(parts: Iterable[str], separator: str, width: int, *, indent: str) -> str:
    """Return parts in lines of at most `width` characters, broken between parts.

    A part that is longer than a line is broken at its spaces.

    Args:
      separator: written after each part but the last, before a space or the line's end.
      indent: what every line but the first begins with.
    """
    room = width - len(separator) - len(indent)
    *most, last = (part.replace(" ", _KEPT) if len(part) <= room else part for part in parts)
    text = " ".join([part + separator.replace(" ", _KEPT) for part in most] + [last])
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines).replace(_KEPT, " ")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table with the first column left-aligned and the others right-aligned.

    If it is wider than `width`, every row becomes "first: heading value, heading value".
    """
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return "\n".join(
            "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])])
            for first, *rest in (headings, *rows)
        )
    lines = []
    for first, *rest in rows:
        parts = [f"{heading} {cell}" for heading, cell in zip(headings[1:], rest, strict=True)]
        lines.append(filled([f"{first}: {parts[0]}", *parts[1:]], ",", width, indent="  "))
    return "\n".join(lines)
