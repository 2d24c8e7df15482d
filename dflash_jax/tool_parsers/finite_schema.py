"""Parts of a JSON schema that no finite value satisfies.

A schema whose values contain another value of the same schema never ends, and one with a lower
bound above its upper bound has no values. The compiler of grammars finds contradictions of texts
and numbers, but no recursion without an end: a model would write brackets until its limit.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

SCHEMAS = ("items", "additionalProperties")  # keywords with one schema
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # with a list of schemas
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")  # with schemas by name
TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
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
                yield f"/{key}/{_escaped(name)}", inner


def resolved(schema: Any, reference: str) -> Any:
    """Return the value that a reference within the schema points to, or None.

    References by `$id` and `$anchor` are not followed.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


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
    """

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._graph = Derivations()
        self._parts: dict[int, int] = {}  # by the identity of a schema
        self._needs: dict[int, list[Any]] = {}  # schemas that a value needs, or may choose
        self._false = self._graph.add()
        self._true = self._graph.define_all(self._graph.add(), ())
        self._todo: list[Mapping[str, Any]] = []
        self._visit(root)
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
        if schema.get("enum") == []:
            needed.append(self._false)
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else TYPES
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


def endless(schema: FiniteSchema) -> str:
    """Return the error of a schema that has no finite value."""
    return (
        f"no finite value fits the JSON schema, because of {schema.cause()}; make a property there"
        " optional, or add an alternative that ends"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _escaped(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
