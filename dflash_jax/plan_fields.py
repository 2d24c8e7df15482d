"""How the fields of a plan are declared, checked and documented."""

import dataclasses
import math
import os
import textwrap
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from dflash_jax.errors import PlanError

Scope = Literal["cache", "program", "host"]


@dataclasses.dataclass(frozen=True)
class PlanField:
    """Documentation, bounds and scope of a field of a plan.

    Attributes:
      help: a short description; also the help text of the field's command-line flag.
      scope: "cache" if the contents of a row's caches depend on the field, and so do programs;
        "program" if only programs depend on it; "host" if neither does.
      details: documentation that follows `help` in `help(Plan)`.
      minimum: least value of a number.
      maximum: largest value of a number.
      choices: the allowed values, or None. Those of a Literal need not be repeated.
      items: names of the two items of a pair.
      automatic: whether 0 or "auto" leaves the value to `graph.resolve`.
      metavar: placeholder of the value in command-line help.
    """

    help: str
    scope: Scope
    details: str = ""
    minimum: float = 0
    maximum: float = math.inf
    choices: tuple[Any, ...] | None = None
    items: str = ""
    automatic: bool = False
    metavar: str | None = None


def plan_field(default: Any, help: str, scope: Scope, **options: Any) -> Any:
    """Return a dataclass field with a default and the `PlanField` of the other arguments."""
    info = PlanField(help, scope, **options)
    return dataclasses.field(default=default, metadata={"plan": info})


def check_field(name: str, value: Any, kind: Any, info: PlanField) -> None:
    """Check a value against the declaration and the type `kind` of its field.

    Raises:
      PlanError: the value has another type, is out of bounds, or is not one of the choices.
    """
    expected = ""
    choices = info.choices or (get_args(kind) if get_origin(kind) is Literal else None)
    if choices:
        named = list(map(str, choices))
        if value not in choices:
            expected = " or ".join(named) if len(named) == 2 else f"one of {', '.join(named)}"
    elif kind is bool:
        if type(value) is not bool:
            expected = "True or False"
    elif kind is int:
        low, zero = info.minimum, ", or 0 for the default" if info.automatic else ""
        if type(value) is not int or not (value >= low or (zero and value == 0)):
            expected = f"an integer of at least {low}{zero}"
    elif kind is float:
        if type(value) not in (int, float) or not info.minimum <= value <= info.maximum:
            expected = f"a number from {info.minimum} to {info.maximum}"
    elif kind == tuple[int, int]:
        if not isinstance(value, tuple) or [type(n) for n in value] != [int, int]:
            expected = f"two integers, {info.items}"
    elif str in get_args(kind) and not isinstance(value, str):
        expected = "a path"
    if expected:
        raise PlanError(f"{name} is {value!r}; expected {expected}")


def documentation(summary: str, fields: Mapping[str, PlanField]) -> str:
    """Return a docstring with a summary and the documentation of the fields."""
    lines = [summary, "", "Attributes:"]
    for name, info in fields.items():
        text = f"{name}: {info.help}." + f" {info.details}" * bool(info.details)
        indent = {"initial_indent": "  ", "subsequent_indent": "    "}
        lines += textwrap.wrap(text, 96, break_on_hyphens=False, **indent)
    return "\n".join(lines)


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
