"""How the fields of a plan, of a request's options and of a server's are declared and checked."""

import dataclasses
import difflib
import math
import os
import textwrap
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """Documentation and bounds of a field.

    Attributes:
      help: a short description; also the help text of the field's command-line flag.
      details: documentation that follows `help` in `help` of the class.
      minimum: least value of a number.
      maximum: largest value of a number.
      choices: the allowed values, or None. Those of a Literal need not be repeated.
      expected: description of the allowed values, for errors; by default derived from the others.
      items: names of the two items of a pair.
      automatic: whether 0 or "auto" leaves the value to `graph.resolve`.
      metavar: placeholder of the value in command-line help.
    """

    help: str
    details: str = ""
    minimum: float = 0
    maximum: float = math.inf
    choices: tuple[Any, ...] | None = None
    expected: str = ""
    items: str = ""
    automatic: bool = False
    metavar: str | None = None

    def mismatch(self, value: Any, kind: Any) -> str:
        """Return what was expected instead of a value of the type `kind`; "" if it fits."""
        choices = self.choices or (get_args(kind) if get_origin(kind) is Literal else None)
        if choices:
            named = list(map(str, choices))
            found = " or ".join(named) if len(named) == 2 else f"one of {', '.join(named)}"
            return "" if value in choices else found
        low, high, found, good = self.minimum, self.maximum, "", True
        if kind is bool:
            found, good = "True or False", type(value) is bool
        elif kind is int:
            zero = ", or 0 for the default" if self.automatic else ""
            bounds = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            found = f"an integer {bounds}{zero}"
            good = type(value) is int and (low <= value <= high or bool(zero and value == 0))
        elif kind is float:
            found = f"a number from {low} to {high}"
            good = type(value) in (int, float) and low <= value <= high
        elif kind == tuple[int, int]:
            found = f"two integers, {self.items}"
            good = isinstance(value, tuple) and [type(n) for n in value] == [int, int]
        elif str in get_args(kind):
            found, good = "a path", isinstance(value, str)
        return "" if good else self.expected or found


def unknown_names(names: Iterable[str], known: Collection[str], what: str) -> str:
    """Return what is wrong with the first name that is not known; "" if all are.

    Args:
      what: what a known name is, such as "field of a plan".
    """
    for name in names:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        return f"{name!r} is no {what}; {hint}"
    return ""


def documentation(summary: str, fields: Mapping[str, Field], end: str = "") -> str:
    """Return a docstring with a summary, the documentation of the fields, and further text."""
    lines = [summary, "", "Attributes:"]
    for name, info in fields.items():
        text = f"{name}: {info.help}." + f" {info.details}" * bool(info.details)
        indent = {"initial_indent": "  ", "subsequent_indent": "    "}
        lines += textwrap.wrap(text, 96, break_on_hyphens=False, **indent)
    return "\n".join(lines) + end


def plain_value(value: Any) -> Any:
    """Return NumPy numbers as Python's, in tuples and lists too, and paths as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(plain_value, value)) if isinstance(value, tuple | list) else value


def tuples(value: Any) -> Any:
    """Return a value with its lists as tuples, which JSON does not have."""
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value
