"""What a program is made from, as a digest, so that it can be found on disk without tracing it.

A trace is a function of the program's function and arguments, of the code that the function runs,
of JAX's settings and of the versions of JAX and Flax. The digest covers all of them: values are
written out, the package's files are read, and code and constants of the loaded modules that the
function can reach are compared as they are, since tests and notebooks replace some of them.
Modules of other packages are not covered, and a program that has any is traced each time.
"""

import dataclasses
import enum
import functools
import hashlib
import operator
import os
import platform
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from dflash_jax.graph.programs import Program
from dflash_jax.utils.processor import processor

PACKAGE = __name__.partition(".")[0]
VERSIONED = ("builtins", "flax", "functools", "jax", "jaxlib", "ml_dtypes", "numpy", "operator")
# Settings that say where things are kept or what is printed.
IRRELEVANT = ("cache", "dir", "log", "no_tracing", "traceback", "explain", "platforms", "captured")
SCALARS = (type(None), bool, int, float, complex, str, bytes, np.dtype)


class UnknownIdentityError(Exception):
    """A program has a value or a module whose influence on its trace is not known."""


class Identities:
    """Digests of programs, as long as no code of this process changes.

    Attributes:
      environment: digest of what every program depends on, but for the package's code.

    Args:
      options: options of XLA.
    """

    def __init__(self, options: Mapping[str, Any]):
        self.environment = digest([*_environment(), repr(sorted(options.items()))])
        self._modules: dict[str, str] = {}  # digests of code by module, as it is now

    def of(self, program: Program) -> str | None:
        """Return the digest of a program; None if it has parts that the digest cannot cover."""
        if program.placement is not None or program.call is not None:
            return None
        description = _Description()
        try:
            description.add(program.function)
            description.add(program.arguments)
        except UnknownIdentityError:
            return None
        code = [self._code(name) for name in sorted(_reachable(description.modules))]
        shared = [self.environment, _sources(), str(program.donated)]
        return digest([*shared, program.key.identifier, *description.parts, *code])

    def _code(self, name: str) -> str:
        if name not in self._modules:
            self._modules[name] = _module_digest(sys.modules[name])
        return self._modules[name]


_digested: dict[str, tuple[list[Any], str]] = {}  # members and digest of each module


def _module_digest(module: types.ModuleType) -> str:
    """Return a digest that changes if a function, a class or a constant of a module is replaced."""
    members = list(_members(module))
    before, known = _digested.get(module.__name__, ([], ""))
    if len(before) != len(members) or any(map(operator.is_not, before, members)):
        known = digest(_module_parts(module))
        _digested[module.__name__] = members, known
    return known


def _members(module: types.ModuleType) -> Iterator[Any]:
    """Yield the values of a module and of its classes."""
    for value in vars(module).values():
        yield value
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from vars(value).values()


class _Description:
    """Texts that determine a value.

    Attributes:
      parts: the texts.
      modules: names of this package's modules whose functions and classes the value has.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.modules: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a value.

        Raises:
          UnknownIdentityError: it is not known what determines it.
        """
        if isinstance(value, enum.Enum):
            self._add_named(type(value))
            self.parts.append(value.name)
        elif isinstance(value, SCALARS):
            self.parts.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, jax.ShapeDtypeStruct):
            if value.sharding is not None:
                raise UnknownIdentityError
            self.parts.append(f"{value.shape} {value.dtype} {value.weak_type}")
        elif isinstance(value, functools.partial):
            self._add_all("partial", [value.func, *value.args, value.keywords])
        elif isinstance(value, Mapping):
            self._add_all(f"mapping {len(value)}", [x for item in value.items() for x in item])
        elif isinstance(value, tuple | list):
            self._add_named(type(value))
            self._add_all(str(len(value)), value)
        elif isinstance(value, set | frozenset):
            self._add_all(f"set {len(value)}", sorted(value, key=repr))
        elif isinstance(value, types.FunctionType) and value.__closure__:
            self._add_named(value)
            self._add_all("closure", [cell.cell_contents for cell in value.__closure__])
        elif isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            self._add_named(value)
        elif dataclasses.is_dataclass(value):
            self._add_named(type(value))
            for field in dataclasses.fields(value):
                self.parts.append(field.name)
                self.add(getattr(value, field.name))
        else:
            raise UnknownIdentityError

    def _add_all(self, kind: str, values: Iterable[Any]) -> None:
        self.parts.append(kind)
        for value in values:
            self.add(value)

    def _add_named(self, value: Any) -> None:
        """Add a function or a class of a package that is covered, by its name."""
        module = value.__module__ or ""
        package = module.partition(".")[0]
        if package == PACKAGE and module in sys.modules:
            self.modules.add(module)
        elif package not in VERSIONED:
            raise UnknownIdentityError
        self.parts.append(f"{module} {value.__qualname__}")


def _reachable(names: Iterable[str]) -> set[str]:
    """Return the loaded modules of this package that some modules refer to, and themselves."""
    waiting = list(names)
    reached = set[str]()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for value in vars(sys.modules[name]).values():
            named = value.__name__ if isinstance(value, types.ModuleType) else None
            named = named or getattr(value, "__module__", None)
            if isinstance(named, str) and named.partition(".")[0] == PACKAGE:
                waiting += [named] if named in sys.modules else []
    return reached


def _module_parts(module: types.ModuleType) -> Iterable[str]:
    """Yield texts that determine the functions, classes and constants of a module."""
    yield module.__name__
    for name, value in sorted(vars(module).items()):
        if not name.startswith("__"):
            yield name
            yield from _value_parts(value, module.__name__, constant=name.isupper())


def _value_parts(value: Any, module: str, *, constant: bool) -> Iterable[str]:
    function = getattr(value, "__wrapped__", value)  # of a cached or a decorated function
    if isinstance(value, SCALARS):
        yield repr(value)
    elif isinstance(function, types.FunctionType):
        yield from _function_parts(function)
    elif isinstance(value, type) and value.__module__ == module:
        for name, member in sorted(vars(value).items()):
            member = getattr(member, "__func__", member)  # of a static or class method
            member = getattr(member, "fget", member)  # of a property
            member = getattr(member, "func", member)  # of a cached property
            if isinstance(getattr(member, "__wrapped__", member), types.FunctionType):
                yield name
                yield from _value_parts(member, module, constant=False)
    elif constant:
        yield from _constant_parts(value)
    else:
        yield _name(value)


def _constant_parts(value: Any) -> Iterable[str]:
    if isinstance(value, SCALARS):
        yield repr(value)
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _constant_parts(item)
    elif isinstance(value, tuple | list):
        yield str(len(value))
        for member in value:
            yield from _constant_parts(member)
    elif isinstance(value, set | frozenset):
        yield from sorted(" ".join(_constant_parts(member)) for member in value)
    else:
        yield _name(value)


def _name(value: Any) -> str:
    """Return the name of a function or a class, or the class of another value."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__} {named.__qualname__}"


def _function_parts(function: types.FunctionType) -> Iterable[str]:
    yield f"{function.__module__} {function.__qualname__}"
    yield from _code_parts(function.__code__)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _constant_parts(default)


def _code_parts(code: types.CodeType) -> Iterable[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        else:
            yield from _constant_parts(constant)


def _environment() -> list[str]:
    settings = [
        (name, getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not any(word in name for word in IRRELEVANT)
    ]
    versions = [platform.python_version(), jax.__version__, jaxlib.__version__, version("flax")]
    devices = [jax.default_backend(), jax.device_count(), jax.devices()[0].device_kind]
    flags = os.environ.get("XLA_FLAGS", "")
    return [processor(), str(versions), str(devices), flags, str(settings)]


@functools.cache
def _sources() -> str:
    """Return the digest of the package's files, those of its native kernels included."""
    root = Path(sys.modules[PACKAGE].__file__ or "").parent
    files = sorted(x for x in root.rglob("*") if x.suffix in (".py", ".cc", ".h"))
    return digest(f"{x.relative_to(root)} {x.read_bytes().hex()}" for x in files)


def digest(parts: Iterable[str]) -> str:
    """Return the SHA-256 of some texts."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode())
        made.update(b"\0")
    return made.hexdigest()
