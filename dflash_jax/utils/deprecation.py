"""Deprecated option names and values, each declared once. They keep working, with a notice."""

import argparse
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

PLAN_FIELDS = {"rounds": "steps_per_call", "order": "weight_layout"}
WARM_UP_KINDS = {"shaped": "penalized", "masked": "constrained"}
FLAGS = {
    "--rounds": "--steps-per-call",
    "--order": "--weight-layout",
    "--taps": "--layer-ids",
    "--target-layer-shift": "--layer-ids",
}
VALUES = {
    "weight_layout": {"rows": "row_major", "columns": "column_major", "panels": "tiled"},
    "layer_ids": {"raw": "zero-based", "plus1": "one-based"},
}


def current_value(option: str, value: Any) -> Any:
    """Return the current name of an option's value, which may be its deprecated name."""
    renamed = VALUES.get(option, {})
    return renamed.get(value, value) if isinstance(value, str) else value


def deprecated_value(option: str, value: str) -> str:
    """Return the deprecated name of an option's value, for attributes with deprecated names."""
    return {new: old for old, new in VALUES[option].items()}.get(value, value)


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that `old` is deprecated in favour of `new`; `stacklevel` as in `warnings.warn`."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel + 1)


class DeprecatedPlanNames:
    """Deprecated names of fields of a plan, as attributes."""

    @property
    def rounds(self: Any) -> int:
        """Deprecated name of `steps_per_call`."""
        warn_renamed("plan.rounds", "plan.steps_per_call")
        return self.steps_per_call

    @property
    def order(self: Any) -> str:
        """Deprecated name of `weight_layout`, with deprecated names of its values."""
        warn_renamed("plan.order", "plan.weight_layout")
        return deprecated_value("weight_layout", self.weight_layout)


def renamed_argument(function: str, old: str, new: str, given: Mapping[str, Any]) -> Any:
    """Return the value that a caller passed by an argument's deprecated name, or None.

    Args:
      given: the keyword arguments that the function does not name.

    Raises:
      TypeError: one of them is not the deprecated name.
    """
    if others := given.keys() - {old}:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(others)!r}")
    if (value := given.get(old)) is not None:
        warn_renamed(f"{function}({old}=)", f"{new}=", stacklevel=3)
    return value


def current_fields(fields: Mapping[str, Any], *, stacklevel: int = 2) -> dict[str, Any]:
    """Return fields of a plan by their current names and with current values.

    A deprecated name takes precedence over the current one: `dataclasses.replace(plan, rounds=2)`
    passes both.
    """
    current = {name: value for name, value in fields.items() if name not in PLAN_FIELDS}
    for old, new in PLAN_FIELDS.items():
        if old in fields:
            warn_renamed(f"Plan({old}=)", f"{new}=", stacklevel=stacklevel + 1)
            current[new] = fields[old]
    for name, value in current.items():
        new_value = current_value(name, value)
        if new_value is not value:
            warn_renamed(f"{name}={value!r}", repr(new_value), stacklevel=stacklevel + 1)
            current[name] = new_value
    return current


def current_kinds(kinds: Mapping[str, bool], known: Iterable[str]) -> dict[str, bool]:
    """Return the kinds of requests of `Engine.warm_up` by their current names.

    Raises:
      TypeError: a name that is neither known nor deprecated.
    """
    current = {}
    for name, value in kinds.items():
        if renamed := WARM_UP_KINDS.get(name):
            warn_renamed(f"warm_up({name}=)", f"{renamed}=", stacklevel=3)
        elif name not in known:
            raise TypeError(f"{name!r} is no kind of request; known are {', '.join(known)}")
        current[renamed or name] = value
    return current


class _RenamedFlag(argparse.Action):
    """Store a deprecated flag's value under the current flag, and print a notice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = current_value(self.dest, values)
        named = "" if value == values else f" {value}"
        notice = f"{option_string} is deprecated; use {FLAGS[option_string or '']}{named}"
        sys.stderr.write(f"{parser.prog}: {notice}\n")
        setattr(namespace, self.dest, value)


def add_deprecated_flag(parser: Any, action: argparse.Action) -> None:
    """Add the deprecated flags of an option, hidden from the help.

    Args:
      parser: the parser or argument group that the option belongs to.
      action: the option, as `add_argument` returned it; nothing is added if it was not renamed.
    """
    for old, new in FLAGS.items():
        if new in action.option_strings:
            choices = action.choices and [*VALUES.get(action.dest, ()), *action.choices]
            parser.add_argument(
                old,
                action=_RenamedFlag,
                dest=action.dest,
                type=action.type,
                choices=choices,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
