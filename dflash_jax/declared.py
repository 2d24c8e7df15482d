"""How fields are declared: of plans, of options of a server or a request, and of recovery.

A class with declared fields checks their values, reads them from JSON, TOML and texts, and has
their documentation. Flags of commands and fields of requests are derived from `fields()`.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from dflash_jax.errors import ConfigError, DFlashError

Scope = Literal["cache", "program", "host"]
Texts = tuple[str, ...]
PATH = str | os.PathLike[str]
WORDS = {  # what values of a type are
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    PATH: "a path",
    Texts: "a list of texts",
}
MOST_NAMED = 10  # unknown names that an error repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """Declaration of a field.

    Attributes:
      default: the value of a field that is not given.
      help: a short description; also the help text of the field's command-line flag.
      details: documentation that follows `help` in `help` of the class.
      minimum: least value of a number.
      maximum: largest value of a number.
      off: whether 0 is allowed as well, below the least value.
      automatic: whether 0 or "auto" leaves the value to `graph.resolve`.
      unset: values that stand for "not given".
      choices: the allowed values; those of a Literal need not be repeated.
      expected: description of the allowed values, for errors; by default derived from the others.
      scope: what depends on a plan's field: "cache" if the contents of a row's caches do, and so do
        programs; "program" if only programs depend on it; "host" if neither does.
      served: whether requests have a field of the name, or the type that it has there.
      aliases: other names of that field.
      command: whether commands that generate have a flag of the name.
      flags: further flags.
      reader: reads a text where the type does not say how; it raises ValueError for a wrong one.
      rare: whether only `--help-all` shows the flag.
      metavar: placeholder of the value in command-line help.
      kind: type of the values but for None; filled in by `fields()`, as the next one is.
      optional: whether None is a value of its own.
    """

    default: Any
    help: str
    details: str = ""
    minimum: float = 0
    maximum: float = math.inf
    off: bool = False
    automatic: bool = False
    unset: tuple[Any, ...] = ()
    choices: tuple[Any, ...] = ()
    expected: str = ""
    scope: Scope | None = None
    served: Any = False
    aliases: Texts = ()
    command: bool = False
    flags: Texts = ()
    reader: Callable[[str], Any] | None = None
    rare: bool = False
    metavar: str | None = None
    kind: Any = None
    optional: bool = False

    def typed(self, hint: Any) -> "Field":
        """Return the declaration with the type of its values."""
        optional = NoneType in get_args(hint)
        others = [kind for kind in get_args(hint) if kind is not NoneType]
        kind = others[0] if optional and len(others) == 1 else hint
        literals = get_args(kind) if get_origin(kind) is Literal else ()
        choices = self.choices or literals
        return dataclasses.replace(self, kind=kind, optional=optional, choices=choices)

    def completed(self, value: Any) -> Any:
        """Return a value with Python's own numbers, or the default if it stands for that."""
        if not isinstance(value, list | tuple) or get_origin(self.kind) is tuple:
            value = plain_value(value)
        is_unset = isinstance(value, int | float | NoneType) and value in self.unset
        return self.default if is_unset else value

    def read(self, value: Any) -> Any:
        """Return a value of JSON or TOML, or a text, in the field's type if it has one there."""
        if not isinstance(value, str):
            return value
        if self.kind is bool:
            return {"true": True, "false": False}.get(value.lower(), value)
        try:
            if self.reader is not None:
                return self.reader(value)
            if self.kind in (int, float):
                return self.kind(value)
            if get_args(self.kind)[:1] == (int,):
                return tuple(map(int, re.split("[x,]", value)))
        except ValueError:
            return value
        return (value,) if self.kind == Texts else value

    def mismatch(self, value: Any) -> str:
        """Return what was expected instead of a value; "" if it fits."""
        if (value is None and self.optional) or self._fits(value):
            return ""
        return self.expected or self._described

    def _fits(self, value: Any) -> bool:
        if self.choices:
            is_named = isinstance(value, str | int) and type(value) is not bool
            return is_named and value in self.choices
        if self.kind in (int, float):
            is_number = type(value) is int or type(value) is self.kind
            is_zero = value == 0 and (self.off or self.automatic)
            return is_number and (self.minimum <= value <= self.maximum or is_zero)
        if self.kind in (bool, str, PATH):
            return type(value) is bool if self.kind is bool else isinstance(value, str)
        item, *others = get_args(self.kind) or [None]
        if get_origin(self.kind) is not tuple or not isinstance(item, type):
            return True
        if not isinstance(value, tuple) or (others != [...] and len(value) != 1 + len(others)):
            return False
        return all(type(each) is item for each in value)

    @property
    def _described(self) -> str:
        """The allowed values in words."""
        if self.choices:
            names = [str(choice) for choice in self.choices]
            return " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
        words = WORDS.get(self.kind, "another value")
        if self.kind not in (int, float):
            return words
        if self.maximum < math.inf:
            words += f" from {self.minimum} to {self.maximum}"
        else:
            words += f" of at least {self.minimum}"
        return f"{words}, or 0 for the default" if self.automatic else words


def declare(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field that carries a `Field`."""
    return declared(Field(default=default, help=help, **more))


def declared(field: Field) -> Any:
    """Return a dataclass field that carries its declaration."""
    return dataclasses.field(default=field.default, metadata={"declared": field})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """Base of frozen dataclasses whose fields are declared by `declare`.

    Values are checked on construction; an error names every wrong one. A field may also be an
    object of such a class, whose fields `parse` takes as if they were its own.
    """

    _error: ClassVar[type[DFlashError]] = ConfigError
    _noun: ClassVar[str] = "field"  # what a name is, for errors

    if not TYPE_CHECKING:  # where the fields are the arguments

        def __new__(cls, /, *values: Any, **fields: Any) -> Self:
            """Check the names of fields, which Python would refuse in words of its own."""
            if values:
                raise cls._error(f"got {values!r} without names; expected fields by name")
            cls._check_names(fields)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        attributes = vars(self)
        values = {name: field.completed(attributes[name]) for name, field in self.fields().items()}
        attributes.update(values)  # the object is frozen
        if problems := self._mismatches(values):
            raise self._error(sentences(problems))
        self._check()

    def _check(self) -> None:
        """Raise an error if values contradict each other. Each of them has the right type."""

    @classmethod
    def _check_names(cls, names: Collection[str]) -> None:
        """Raise an error for names that are no fields."""
        known = [field.name for field in dataclasses.fields(cls)]
        if problems := unknown_names(names, known, cls._noun):
            raise cls._error(sentences(problems))

    @classmethod
    def _label(cls, name: str) -> str:
        """Return what users call a field, for errors."""
        return name

    @classmethod
    def fields(cls) -> Mapping[str, Field]:
        """Return the declared fields by name."""
        return fields_of(cls)

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str = "", base: Self | None = None) -> Self:
        """Return an object with values of JSON or TOML, or texts.

        Args:
          where: name of what has these values, for errors.
          base: object that has the other values; by default, they are the fields' defaults.

        Raises:
          DFlashError: names are unknown, or values are wrong; all of them are named.
        """
        start = f"{where}: " if where else ""
        if not isinstance(values, Mapping):
            raise cls._error(f"{start}got {values!r}; expected an object with fields by name")
        parts = cls._parts()
        owners = parts | {"": cls}
        homes: dict[str, str] = {}
        for part, owner in owners.items():
            homes |= dict.fromkeys(owner.fields(), part)
        problems = unknown_names(values, homes, cls._noun)
        chosen: dict[str, dict[str, Any]] = {part: {} for part in owners}
        for name, value in values.items():
            if name in homes:
                part = homes[name]
                field = owners[part].fields()[name]
                new = {name: field.completed(field.read(value))}
                problems += owners[part]._mismatches(new)
                chosen[part] |= new
        if problems:
            raise cls._error(start + sentences(problems))
        try:
            own = chosen[""]
            for part, kind in parts.items():
                before = getattr(base or cls, part, None)  # the class has the default
                new = chosen[part]
                own[part] = dataclasses.replace(before, **new) if before else kind(**new)
            return cls(**own) if base is None else dataclasses.replace(base, **own)
        except DFlashError as error:
            raise type(error)(f"{start}{error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return the values by name, as JSON has them; `parse` reads them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def _parts(cls) -> dict[str, type["Declared"]]:
        """Return the types of the fields that are objects with declared fields, by name."""
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        return {
            name: kind
            for name, kind in kinds.items()
            if isinstance(kind, type) and issubclass(kind, Declared)
        }

    @classmethod
    def _mismatches(cls, values: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with each value that does not fit its field."""
        problems = []
        for name, value in values.items():
            if expected := cls.fields()[name].mismatch(value):
                problems.append(f"{cls._label(name)} is {value!r}; expected {expected}")
        return problems


@functools.cache
def fields_of(cls: Any) -> Mapping[str, Field]:
    """Return the declared fields of a dataclass by name."""
    hints = get_type_hints(cls)
    return {
        field.name: field.metadata["declared"].typed(hints[field.name])
        for field in dataclasses.fields(cls)
        if "declared" in field.metadata
    }


def document(cls: type[Declared], end: str = "") -> None:
    """Add the documentation of its fields to the docstring of a class, and then further text."""
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:"]
    for name, field in cls.fields().items():
        text = f"{name}: {field.help}."
        if field.details:
            text += f" {field.details}"
        lines += textwrap.wrap(
            text, 96, break_on_hyphens=False, initial_indent="  ", subsequent_indent="    "
        )
    cls.__doc__ = "\n".join(lines) + end


def sentences(problems: Iterable[str]) -> str:
    """Return problems as one line."""
    return ". ".join(problems).replace("?. ", "? ")


def unknown_names(names: Iterable[str], known: Collection[str], what: str) -> list[str]:
    """Return what is wrong with each name that is not known; of many, the others are counted.

    Args:
      what: what a known name is, such as "field of a plan".
    """
    problems: list[str] = []
    unknown = [name for name in names if name not in known]
    listed = f"; known are {', '.join(known)}" if unknown else ""
    for name in unknown[:MOST_NAMED]:
        if close := difflib.get_close_matches(str(name), known, 1):
            problems.append(f"{name!r} is no {what}; did you mean {close[0]!r}?")
        else:
            problems.append(f"{name!r} is no {what}{listed}")
            listed = ""  # once is enough
    if more := len(unknown) - len(problems):
        problems.append(f"{more} more are no {what}")
    return problems


def plain_value(value: Any) -> Any:
    """Return NumPy numbers as Python's, paths as text, and lists as tuples with such values."""
    if type(value) in (NoneType, bool, int, float, str):  # most are, and other checks take longer
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(plain_value, value)) if isinstance(value, tuple | list) else value
