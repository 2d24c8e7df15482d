"""JSON schemas as the grammar compiler gets them: every repetition outside of free text is bounded.

Without bounds, output can loop in white space, in digits or in fractions of seconds. Schemas that
have no finite value become `false`, which the compiler leaves out where another value is possible.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from dflash_jax.errors import RequestError

# Parts of a JSON schema that no finite value satisfies.
#
# A schema whose values contain another value of the same schema never ends, and one with a lower
# bound above its upper bound has no values. The compiler of grammars finds contradictions of texts
# and numbers, but no recursion without an end: a model would write brackets until its limit.


SCHEMAS = ("items", "additionalProperties")  # keywords with one schema
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # with a list of schemas
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")  # with schemas by name
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
RANGES = {
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, with their paths in it, such as "/properties/a"."""
    for key, value in schema.items():
        if key in SCHEMAS and not isinstance(value, list):
            yield f"/{key}", value
        elif key in LISTS and isinstance(value, list):
            for at, inner in enumerate(value):
                yield f"/{key}/{at}", inner
        elif key in MAPPINGS and isinstance(value, Mapping):
            for name, inner in value.items():
                name = str(name).replace("~", "~0").replace("/", "~1")
                yield f"/{key}/{name}", inner


def resolved(schema: Any, reference: str) -> Any:
    """Return the value that a reference within the schema points to, or None.

    References by `$id` and `$anchor` are not followed.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    for step in reference.removeprefix("#").split("/")[1:]:
        name = unescaped(step)
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def unescaped(step: str) -> str:
    """Return the name that a step of a reference stands for."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def relocated(value: Any, old: str, new: str) -> Any:
    """Return a schema whose references that start with `old` start with `new` instead."""
    if isinstance(value, list):
        return [relocated(inner, old, new) for inner in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: relocated(inner, old, new) for key, inner in value.items()}
    if isinstance(text := value.get("$ref"), str) and text.startswith(old):
        found["$ref"] = new + text.removeprefix(old)
    return found


# Which parts of a grammar derive a finite text.
#
# A part needs all or some of other parts. The parts with a finite derivation are the least fixed
# point, found in time linear in the number of needs.


class Derivations:
    """A graph of the parts of a grammar. A part that was not defined has no finite derivation."""

    def __init__(self) -> None:
        self._missing: list[int] = []  # by part, the number of parts that it still waits for
        self._users: list[list[int]] = []  # by part, the parts that need it
        self._finite: list[bool] = []

    def add(self) -> int:
        """Return a new part."""
        self._missing.append(1)
        self._users.append([])
        self._finite.append(False)
        return len(self._missing) - 1

    def define_all(self, part: int, needed: Iterable[int]) -> int:
        """Define a part that needs every one of these parts, and return it."""
        needed = list(needed)
        self._missing[part] = len(needed)
        for other in needed:
            self._users[other].append(part)
        return part

    def define_any(self, part: int, needed: Iterable[int]) -> int:
        """Define a part that needs one of these parts, and return it."""
        for other in needed:
            self._users[other].append(part)
        return part

    def finite(self) -> list[bool]:
        """Return, by part, whether it has a finite derivation; call it once, at the end."""
        waiting = [part for part, missing in enumerate(self._missing) if missing <= 0]
        for part in waiting:
            self._finite[part] = True
        while waiting:
            for user in self._users[waiting.pop()]:
                self._missing[user] -= 1
                if self._missing[user] <= 0 and not self._finite[user]:
                    self._finite[user] = True
                    waiting.append(user)
        return self._finite


class FiniteSchema:
    """The parts of a schema that have finite values.

    Args:
      root: a schema of bounded depth, as checked by `grammar_bounds.check_schema`.
      derived: further schemas, whose references are to the root.
    """

    def __init__(self, root: Mapping[str, Any], derived: Iterable[Any] = ()):
        self._root = root
        self._graph = Derivations()
        self._parts: dict[int, int] = {}  # by the identity of a schema
        self._false = self._graph.add()
        self._true = self._graph.define_all(self._graph.add(), ())
        self._todo: list[Mapping[str, Any]] = []
        self._visit(root)
        for schema in derived:
            self._visit(schema)
        while self._todo:
            schema = self._todo.pop()
            for _, inner in subschemas(schema):
                self._visit(inner)
            self._define(schema)
        self._finite = self._graph.finite()

    def ends(self, schema: Any) -> bool:
        """Return whether a part of the schema has a finite value."""
        part = self._parts.get(id(schema)) if isinstance(schema, Mapping) else None
        return part is None or self._finite[part]

    def cause(self) -> str:
        """Return the path of the innermost part for which the whole schema has no finite value."""
        schema, path, seen = self._root, "#", {id(self._root)}
        while True:
            inner = [
                (place, x)
                for place, x in (*subschemas(schema), *self._reference(schema))
                if isinstance(x, Mapping) and not self.ends(x) and id(x) not in seen
                and not place.startswith(("/$defs", "/definitions"))
            ]  # fmt: skip
            if not inner:
                return path
            place, schema = inner[0]
            path = place if place.startswith("#") else path + place
            seen.add(id(schema))

    def _reference(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        place = schema.get("$ref")
        if isinstance(place, str):
            yield place, resolved(self._root, place)

    def _visit(self, schema: Any) -> int:
        """Return the part of a schema, which is defined later."""
        if not isinstance(schema, Mapping):
            return self._false if schema is False else self._true
        if id(schema) not in self._parts:
            self._parts[id(schema)] = self._graph.add()
            self._todo.append(schema)
        return self._parts[id(schema)]

    def _define(self, schema: Mapping[str, Any]) -> None:
        needed = []
        for _, target in self._reference(schema):
            needed.append(self._visit(target))
        if isinstance(every := schema.get("allOf"), list):
            needed += map(self._visit, every)
        for key in ("anyOf", "oneOf"):
            if isinstance(some := schema.get(key), list):
                needed.append(self._any(map(self._visit, some)))
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list) and not of_type(values, schema.get("type")):
                needed.append(self._false)
        kinds = schema.get("type")
        kinds = (
            kinds
            if isinstance(kinds, list)
            else [kinds]
            if isinstance(kinds, str)
            else tuple(KINDS)
        )
        if "const" not in schema and "enum" not in schema:
            needed.append(self._any([self._of_kind(schema, kind) for kind in kinds]))
        self._graph.define_all(self._parts[id(schema)], needed)

    def _any(self, parts: Any) -> int:
        return self._graph.define_any(self._graph.add(), parts)

    def _of_kind(self, schema: Mapping[str, Any], kind: Any) -> int:
        """Return the part of the schema's values of one type."""
        needed = []
        ends = RANGES.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        low, high = (_number(schema.get(key)) for key in ends)
        if low is not None and high is not None and low > high:
            return self._false
        properties = _mapping(schema.get("properties"))
        if kind == "object" and isinstance(required := schema.get("required"), list):
            others = schema.get("additionalProperties")
            patterns = "patternProperties" in schema
            for name in required:
                if isinstance(name, str) and name in properties:
                    needed.append(self._visit(properties[name]))
                elif others is not None and not patterns:
                    needed.append(self._visit(others))
        if kind == "array" and (least := _number(schema.get("minItems"))):
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            needed += [self._visit(x) for at, x in enumerate(first) if at < least]
            if least > len(first):
                needed.append(self._visit(schema.get("items")))
        return self._graph.define_all(self._graph.add(), needed)


def of_type(values: list[Any], stated: Any) -> list[Any]:
    """Return the values that have the stated type, or one of those; any have an unknown one."""
    names = stated if isinstance(stated, list) else [stated]
    names = [name for name in names if isinstance(name, str)]
    types = {kind for name in names for kind in KINDS.get(name, (object,))}
    if not types or object in types:
        return values
    whole = "integer" in names  # JSON has one kind of numbers
    return [
        value
        for value in values
        if type(value) in types or (whole and type(value) is float and value % 1 == 0)
    ]


def endless(schema: FiniteSchema) -> str:
    """Return the error of a schema that has no finite value."""
    return (
        f"no finite value fits the JSON schema, because of {schema.cause()}; make a property there"
        " optional, or add an alternative that ends, or values of its type"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Numbers in JSON schemas, as the grammar compiler can follow them exactly.
#
# The compiler holds numbers as doubles, and writes bounds digit by digit. Bounds that a double
# cannot hold are moved inwards to one that it can, so that no output is outside of the schema.


MOST_INTEGER = 2**53 - 1  # of JSON's common numbers (RFC 7493); the bound of integers without one
MOST_EXACT = 2**63 - 1024  # the largest double that the compiler takes for an integer
MOST_COEFFICIENT = 2**32 - 1  # of multipleOf, as an integer times a power of ten
FRACTION = 1e-10  # numbers are multiples of it: the smallest power of ten that the compiler takes
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_literals(value: Any, path: str) -> None:
    """Check that the numbers of a `const` or `enum` are written with their exact digits.

    Raises:
      RequestError: one would not be.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif is_number(value):
            exact = abs(value) <= MOST_EXACT and int(float(value)) == value
            if isinstance(value, float):
                exact = math.isfinite(value) and abs(value) != 2.0**63
            if not exact:
                raise RequestError(
                    f"the JSON schema has the number {value} at {path}, whose digits cannot be"
                    " written exactly, as it is not a 64-bit floating-point number of less than"
                    " 2^63; write it as a string"
                )


def exact_bounds(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema with bounds that a double can hold, and without those that bound nothing.

    Raises:
      RequestError: all numbers that a bound allows are too large to be exact.
    """
    found = dict(schema)
    for names, sign in ((LOWER, 1), (UPPER, -1)):
        for name in names:
            if not is_number(value := schema.get(name)):
                continue
            if math.isnan(value) or value * sign > MOST_EXACT:
                raise RequestError(
                    f"the JSON schema has {name} {value} at {path}/{name}, beyond which no number"
                    f" is exact; expected {'at most' if sign > 0 else 'at least'}"
                    f" {sign * MOST_EXACT}: use a string with a pattern"
                )
            if value * sign < -MOST_EXACT:
                del found[name]
            else:
                found[name] = _inwards(value, sign)
    return found


def _inwards(value: float, sign: int) -> int | float:
    """Return the nearest number, not outside of a bound, that is exact as a double and as text."""
    if 0 < abs(value) < FRACTION:
        return sign * FRACTION if value * sign > 0 else 0
    if isinstance(value, float) or abs(value) <= MOST_INTEGER:
        return value
    rounded = float(value)
    while min((int(rounded) - value) * sign, (Decimal(repr(rounded)) - value) * sign) < 0:
        rounded = math.nextafter(rounded, sign * math.inf)
    return int(rounded)


def default_bounds(schema: Mapping[str, Any], kinds: list[Any]) -> dict[str, int]:
    """Return the bounds that a schema of numbers lacks; without any, output could loop in digits.

    Args:
      kinds: its types.
    """
    if not {"integer", "number"} & {kind for kind in kinds if isinstance(kind, str)}:
        return {}
    low, high = (
        next((schema[name] for name in names if is_number(schema.get(name))), None)
        for names in (LOWER, UPPER)
    )
    bounds: dict[str, int] = {}
    if low is None:
        bounds["minimum"] = -MOST_INTEGER if high is None or high > -MOST_INTEGER else -MOST_EXACT
    if high is None:
        bounds["maximum"] = MOST_INTEGER if low is None or low < MOST_INTEGER else MOST_EXACT
    return bounds


def check_multiple(value: Any, path: str) -> None:
    """Check that `multipleOf` is a number that the compiler follows exactly.

    Raises:
      RequestError: it is not.
    """
    if not is_number(value):
        return  # the compiler reports the type
    if not value > 0 or decimal(value) is None:
        raise RequestError(
            f"the JSON schema has multipleOf {value} at {path}/multipleOf; expected a number above"
            " 0 with few digits, such as 5 or 0.01: leave it out, and check the number afterwards"
        )


def decimal(value: float) -> tuple[int, int] | None:
    """Return a multiple as an integer and a number of decimals; None if the compiler errs in it.

    The compiler multiplies by ten until no fraction is left, which accumulates rounding errors.
    """
    if not math.isfinite(value):
        return None
    scaled, places = float(value), 0
    while scaled % 1 and scaled <= MOST_COEFFICIENT:
        scaled, places = scaled * 10.0, places + 1
    exact = Decimal(scaled).scaleb(-places) == Decimal(repr(value))
    return (int(scaled), places) if exact and scaled <= MOST_COEFFICIENT else None


def check_common_multiples(multiples: list[float]) -> None:
    """Check that the compiler can combine all these multiples, where a schema combines schemas.

    Raises:
      RequestError: two of them have a common multiple that is too large for it.
    """
    pairs = {value: found for value in multiples if (found := decimal(value))}
    for one, (first, places) in pairs.items():
        for other, (second, more) in pairs.items():
            if first * second * 10 ** abs(places - more) > MOST_COEFFICIENT:
                raise RequestError(
                    f"the JSON schema has multipleOf {one} and multipleOf {other} and combines"
                    " schemas; leave one out, and check the number afterwards"
                )


def multiples(schema: Any) -> Iterator[float]:
    """Yield the values of `multipleOf` in a schema, at any depth."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if is_number(found := value.get("multipleOf")) and found > 0:
                yield found
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


# String formats that the compiler supports, and the most characters of a text of unbounded ones.
FORMATS = {"date-time": 35, "time": 24, "date": None, "duration": 40, "email": 254,
           "hostname": 253, "ipv4": None, "ipv6": None, "uuid": None, "uri": 2048,
           "unknown": None}  # fmt: skip
LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MOST_LENGTH = 2**31  # no output is longer
SPACE = r"( |\n {0,16})?"  # between JSON tokens
COMBINING = ("$ref", "anyOf", "oneOf")  # constraints next to these apply to the same value
ANNOTATIONS = frozenset(["title", "description", "default", "examples", "$defs", "definitions",
    "$schema", "$id", "$comment", "x-guidance", "deprecated", "readOnly", "writeOnly"])  # fmt: skip
ANY = "any_value"  # name of a definition that is added
COMPOSITE = ("object", "array")
TYPES = ["string", "number", "boolean", "null", *COMPOSITE]


def bounded(schema: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Return a JSON schema with bounds on white space, numbers and formats that have none.

    Args:
      strict: the compiler refuses keywords that a grammar cannot express, such as "uniqueItems",
        instead of ignoring them.

    Raises:
      RequestError: a number cannot be followed exactly, or no finite value fits the schema.
    """
    guidance = {"whitespace_pattern": SPACE, "lenient": not strict}
    adapted = _Bounds(schema, strict=strict).adapted()
    return {"x-guidance": guidance, **adapted}


class _Bounds:
    """Adds bounds to the parts of one schema."""

    def __init__(self, root: Mapping[str, Any], *, strict: bool):
        self._root, self._strict = root, strict
        self._finite = FiniteSchema(root)
        combines, found = _combines(root), list(multiples(root))
        if combines:
            check_common_multiples(found)
        # The compiler could not combine a bound on fractions with large multiples, and is slow in
        # combining the definition of any value with others.
        self._fractions = not (combines and found)
        self._any = not combines and ANY not in _mapping(root.get("$defs"))
        self._used_any = False

    def adapted(self) -> dict[str, Any]:
        """Return the whole schema with bounds."""
        if not self._finite.ends(self._root):
            raise RequestError(endless(self._finite))
        found = self._schema(self._root, "#")
        if self._used_any:
            values: dict[str, Any] = {"type": TYPES}
            values |= default_bounds({}, TYPES) | {"multipleOf": FRACTION}
            reference = self._any_value()
            values |= {"items": reference, "additionalProperties": reference}
            found["$defs"] = {**_mapping(found.get("$defs")), ANY: values}
        return found

    def _schema(self, schema: Any, path: str) -> Any:
        """Return a schema with bounds; `path` is its place, for errors."""
        if not isinstance(schema, Mapping):
            return self._any_value() if schema is True and self._any else schema
        if not self._finite.ends(schema):
            return False
        found: dict[str, Any] = {}
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in ("const", "enum"):
                check_literals(value, place)
                found[key] = value
            elif key in SCHEMAS and not isinstance(value, list):
                found[key] = self._schema(value, place)
            elif key in LISTS and isinstance(value, list):
                found[key] = [self._schema(x, f"{place}/{i}") for i, x in enumerate(value)]
            elif key in MAPPINGS and isinstance(value, Mapping):
                found[key] = {name: self._schema(x, f"{place}/{name}") for name, x in value.items()}
            elif key in LENGTHS and is_number(value) and value % 1 == 0:
                if not (key.startswith("max") and value > MOST_LENGTH):
                    found[key] = int(value)
            elif key == "format" and self._strict and isinstance(value, str):
                if value in FORMATS:  # others are hints like "password", which would be refused
                    found[key] = value
            else:
                found[key] = value
        if "multipleOf" in found:
            check_multiple(found["multipleOf"], path)
        kinds = found.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if {"integer", "number", None} & {x for x in kinds if isinstance(x, str | None)}:
            found = exact_bounds(found, path)
        if "const" in found or "enum" in found:
            return found
        if self._any and not set(found) - ANNOTATIONS:
            return found | self._any_value()
        return found | self._more(found, kinds)

    def _more(self, found: Mapping[str, Any], kinds: list[Any]) -> dict[str, Any]:
        """Return the bounds that a schema lacks."""
        more: dict[str, Any] = default_bounds(found, kinds)
        if "number" in kinds and "multipleOf" not in found and self._fractions:
            more["multipleOf"] = FRACTION
        length = FORMATS.get(found["format"]) if isinstance(found.get("format"), str) else None
        if length is not None and "maxLength" not in found:
            more["maxLength"] = length
        if self._any and "object" in kinds and "additionalProperties" not in found:
            more["additionalProperties"] = self._any_value()
        if self._any and "array" in kinds and "items" not in found:
            more["items"] = self._any_value()
        return more

    def _any_value(self) -> dict[str, Any]:
        self._used_any = True
        return {"$ref": f"#/$defs/{ANY}"}


def _combines(schema: Any) -> bool:
    """Return whether several schemas of a document may apply to one value."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            keys = set(value) - ANNOTATIONS
            if "allOf" in keys or (len(keys) > 1 and not keys.isdisjoint(COMBINING)):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False
