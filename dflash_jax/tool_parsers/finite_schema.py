"""Parts of a JSON schema that no finite value satisfies.

A schema whose values contain another value of the same schema never ends, and one with a lower
bound above its upper bound has no values. The compiler of grammars finds contradictions of texts
and numbers, but no recursion without an end: a model would write brackets until its limit.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

SCHEMAS = ("items", "additionalProperties")  # keywords with one schema
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # keywords with a list of schemas

# Keywords with schemas by name.
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
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
    moved = {key: relocated(inner, old, new) for key, inner in value.items()}
    if isinstance(text := value.get("$ref"), str) and text.startswith(old):
        moved["$ref"] = new + text.removeprefix(old)
    return moved


class Derivations:
    """A graph of the parts of a grammar, to find which parts derive a finite text.

    A part needs all or some of other parts. The parts with a finite derivation are the least fixed
    point, found in time linear in the number of needs. A part that was not defined has none.
    """

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
      root: the schema that references are to.
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
        schema = self._root
        path = "#"
        seen = {id(self._root)}
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
        stated = schema.get("type")
        kinds: Iterable[Any] = tuple(KINDS)
        if isinstance(stated, list):
            kinds = stated
        elif isinstance(stated, str):
            kinds = [stated]
        if "const" not in schema and "enum" not in schema:
            needed.append(self._any([self._of_kind(schema, kind) for kind in kinds]))
        self._graph.define_all(self._parts[id(schema)], needed)

    def _any(self, parts: Any) -> int:
        return self._graph.define_any(self._graph.add(), parts)

    def _of_kind(self, schema: Mapping[str, Any], kind: Any) -> int:
        """Return the part of the schema's values of one type."""
        needed = []
        least_key, most_key = RANGES.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        low = _number(schema.get(least_key))
        high = _number(schema.get(most_key))
        if low is not None and high is not None and low > high:
            return self._false
        properties = mapping_or_empty(schema.get("properties"))
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


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """Return a JSON value that is an object; an empty one for any other."""
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
