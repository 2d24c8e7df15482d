"""JSON schemas as the grammar compiler gets them: every repetition outside of free text is bounded.

Without bounds, output can loop in white space, in digits or in fractions of seconds. Schemas that
have no finite value become `false`, which the compiler leaves out where another value is possible.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.finite_schema import (
    LISTS,
    MAPPINGS,
    SCHEMAS,
    FiniteSchema,
    endless,
    mapping_or_empty,
)
from dflash_jax.tool_parsers.schema_numbers import (
    FRACTION,
    check_common_multiples,
    check_literals,
    check_multiple,
    default_bounds,
    exact_bounds,
    is_number,
    multiples,
)

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
      RequestError: a number cannot be followed exactly, no finite value fits the schema, or it is
        nested too deeply.
    """
    guidance = {"whitespace_pattern": SPACE, "lenient": not strict}
    try:
        adapted = _Bounds(schema, strict=strict).adapted()
    except RecursionError as error:
        raise too_deep() from error
    return {"x-guidance": guidance, **adapted}


def too_deep() -> RequestError:
    """Return the error of a schema whose nesting exhausts the stack."""
    return RequestError(
        "the JSON schema is nested too deeply; move inner schemas to $defs, and refer to them"
    )


class _Bounds:
    """Adds bounds to the parts of one schema."""

    def __init__(self, root: Mapping[str, Any], *, strict: bool):
        self._root = root
        self._strict = strict
        self._finite = FiniteSchema(root)
        combines = _combines(root)
        every_multiple = list(multiples(root))
        if combines:
            check_common_multiples(every_multiple)
        # The compiler could not combine a bound on fractions with large multiples, and is slow in
        # combining the definition of any value with others.
        self._fractions = not (combines and every_multiple)
        self._any = not combines and ANY not in mapping_or_empty(root.get("$defs"))
        self._used_any = False

    def adapted(self) -> dict[str, Any]:
        """Return the whole schema with bounds."""
        if not self._finite.ends(self._root):
            raise RequestError(endless(self._finite))
        schema = self._schema(self._root, "#")
        if self._used_any:
            values: dict[str, Any] = {"type": TYPES}
            values |= default_bounds({}, TYPES) | {"multipleOf": FRACTION}
            reference = self._any_value()
            values |= {"items": reference, "additionalProperties": reference}
            schema["$defs"] = {**mapping_or_empty(schema.get("$defs")), ANY: values}
        return schema

    def _schema(self, schema: Any, path: str) -> Any:
        """Return a schema with bounds; `path` is its place, for errors."""
        if not isinstance(schema, Mapping):
            return self._any_value() if schema is True and self._any else schema
        if not self._finite.ends(schema):
            return False
        result: dict[str, Any] = {}
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in ("const", "enum"):
                check_literals(value, place)
                result[key] = value
            elif key in SCHEMAS and not isinstance(value, list):
                result[key] = self._schema(value, place)
            elif key in LISTS and isinstance(value, list):
                result[key] = [self._schema(x, f"{place}/{i}") for i, x in enumerate(value)]
            elif key in MAPPINGS and isinstance(value, Mapping):
                result[key] = {
                    name: self._schema(x, f"{place}/{name}") for name, x in value.items()
                }
            elif key in LENGTHS and is_number(value) and value % 1 == 0:
                if not (key.startswith("max") and value > MOST_LENGTH):
                    result[key] = int(value)
            elif key == "format" and self._strict and isinstance(value, str):
                if value in FORMATS:  # others are hints like "password", which would be refused
                    result[key] = value
            else:
                result[key] = value
        if "multipleOf" in result:
            check_multiple(result["multipleOf"], path)
        kinds = result.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if {"integer", "number", None} & {x for x in kinds if isinstance(x, str | None)}:
            result = exact_bounds(result, path)
        if "const" in result or "enum" in result:
            return result
        if self._any and not set(result) - ANNOTATIONS:
            return result | self._any_value()
        return result | self._missing(result, kinds)

    def _missing(self, schema: Mapping[str, Any], kinds: list[Any]) -> dict[str, Any]:
        """Return the bounds that a schema lacks."""
        bounds: dict[str, Any] = default_bounds(schema, kinds)
        if "number" in kinds and "multipleOf" not in schema and self._fractions:
            bounds["multipleOf"] = FRACTION
        length = FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
        if length is not None and "maxLength" not in schema:
            bounds["maxLength"] = length
        if self._any and "object" in kinds and "additionalProperties" not in schema:
            bounds["additionalProperties"] = self._any_value()
        if self._any and "array" in kinds and "items" not in schema:
            bounds["items"] = self._any_value()
        return bounds

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
