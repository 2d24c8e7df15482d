"""JSON schemas as the grammar compiler gets them: every repetition outside of free text is bounded.

Without bounds, output can loop in white space, in digits or in fractions of seconds. Schemas that
have no finite value become `false`, which the compiler leaves out where another value is possible.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers import schema_numbers as numbers
from dflash_jax.tool_parsers.finite_schema import LISTS, MAPPINGS, SCHEMAS, FiniteSchema, endless

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
        combines, found = _combines(root), list(numbers.multiples(root))
        if combines:
            numbers.check_common_multiples(found)
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
            values |= numbers.default_bounds({}, TYPES) | {"multipleOf": numbers.FRACTION}
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
                numbers.check_literals(value, place)
                found[key] = value
            elif key in SCHEMAS and not isinstance(value, list):
                found[key] = self._schema(value, place)
            elif key in LISTS and isinstance(value, list):
                found[key] = [self._schema(x, f"{place}/{i}") for i, x in enumerate(value)]
            elif key in MAPPINGS and isinstance(value, Mapping):
                found[key] = {name: self._schema(x, f"{place}/{name}") for name, x in value.items()}
            elif key in LENGTHS and numbers.is_number(value) and value % 1 == 0:
                if not (key.startswith("max") and value > MOST_LENGTH):
                    found[key] = int(value)
            elif key != "format" or not self._ignored_format(value):
                found[key] = value
        if "multipleOf" in found:
            numbers.check_multiple(found["multipleOf"], path)
        kinds = found.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if {"integer", "number", None} & {x for x in kinds if isinstance(x, str | None)}:
            found = numbers.exact_bounds(found, path)
        if "const" in found or "enum" in found:
            return found
        if self._any and not set(found) - ANNOTATIONS:
            return found | self._any_value()
        return found | self._more(found, kinds)

    def _more(self, found: Mapping[str, Any], kinds: list[Any]) -> dict[str, Any]:
        """Return the bounds that a schema lacks."""
        more: dict[str, Any] = numbers.default_bounds(found, kinds)
        if "number" in kinds and "multipleOf" not in found and self._fractions:
            more["multipleOf"] = numbers.FRACTION
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

    def _ignored_format(self, name: Any) -> bool:
        """Return whether a format is a hint like "password", which the compiler would refuse."""
        return self._strict and isinstance(name, str) and name not in FORMATS


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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
