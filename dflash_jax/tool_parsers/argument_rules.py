"""Rules of grammars for the arguments of a tool, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import bounded
from dflash_jax.tool_parsers.finite_schema import FiniteSchema, endless, relocated
from dflash_jax.tool_parsers.tool_schema import Tool

Quote = Callable[[str], str]  # a text as grammar terminals
WHOLE = "parameters"  # a definition with those of the tool, for references between them


def all_arguments(tool: Tool) -> str:
    """Return the arguments of a tool, as one JSON object, as a part of a rule."""
    return as_rule(tool, tool.parameters or {"type": "object"})


def as_rule(tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return a schema of a tool as a part of a rule.

    Raises:
      RequestError: a number cannot be followed exactly, or no finite value fits the schema.
    """
    try:
        return f"%json {json.dumps(bounded(schema))}"
    except RequestError as error:
        raise RequestError(f"the tool {tool.name!r}: {error}") from error


def parameter_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """Return the schema of one parameter with the definitions that its references need."""
    schema = tool.properties[name]
    if not isinstance(schema, Mapping):
        return {}
    if '"$ref"' not in json.dumps(schema):
        return schema
    moved = relocated(tool.parameters, "#", f"#/$defs/{WHOLE}")
    path = "/properties/" + name.replace("~", "~0").replace("/", "~1")
    return {"$ref": f"#/$defs/{WHOLE}{path}", "$defs": {WHOLE: moved}}


def finite_parameters(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Return (name, schema, required) of the parameters in declaration order.

    Optional parameters without a finite value are left out.

    Raises:
      RequestError: a required parameter has no finite value.
    """
    finite = FiniteSchema(tool.parameters)
    if not finite.ends(tool.parameters):
        raise RequestError(f"the tool {tool.name!r}: {endless(finite)}")
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    return [
        (name, schema, name in required)
        for name, schema in tool.properties.items()
        if schema is not False and finite.ends(schema)
    ]


def enum_texts(schema: Any) -> list[str]:
    """Return the values of a string enum; empty for other schemas."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return values if isinstance(values, list) and all(isinstance(v, str) for v in values) else []
