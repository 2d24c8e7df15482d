"""Tools and tool choices of every API's shape, made one; and how recovery may begin a call.

Chat completions nest a `function`, Responses are flat, Anthropic says `input_schema`.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.syntax import Syntax

KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_DEPTH = (
    200  # lists and mappings in each other: json and templates recurse over what they write
)
PREFERRED = "terminal"  # of several tools, the one an agent can do anything with


@dataclasses.dataclass(frozen=True)
class Tool:
    """A declared tool; `parameters` is its JSON schema."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def first_parameter(self) -> str | None:
        """The first required parameter, else the first declared one."""
        required = self.parameters.get("required")
        names = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
        return next(iter(names or self.properties), None)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The parameters' schemas by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """A normalised `tool_choice`; `name` is the tool a "named" one demands."""

    kind: Literal["auto", "none", "required", "named"]
    name: str | None = None


AUTO = ToolChoice("auto")
CHOICES = {
    "auto": AUTO,
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def tools_of(declared: Any) -> tuple[Tool, ...]:
    """The tools of a request's `tools`; what is no function is left out, first names win."""
    found: dict[str, Tool] = {}
    for entry in declared if isinstance(declared, Sequence) else ():
        if not isinstance(entry, Mapping):
            continue
        body = entry["function"] if isinstance(entry.get("function"), Mapping) else entry
        name = body.get("name")
        schema = body.get("parameters", body.get("input_schema"))
        if isinstance(name, str) and name:
            found.setdefault(name, Tool(name, schema if isinstance(schema, Mapping) else {}))
    return tuple(found.values())


def choice_of(tool_choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """A request's `tool_choice`; absent and unknown words are "auto".

    Raises:
      RequestError: it names a tool that was not declared.
    """
    if not isinstance(tool_choice, Mapping):
        return CHOICES.get(str(tool_choice), AUTO)
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
    if name is None and isinstance(kind := tool_choice.get("type"), str) and kind in CHOICES:
        return CHOICES[kind]
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestError(
            f"tool_choice names the tool {name!r}, but the declared tools are: {known};"
            " declare it, or choose one of those"
        )
    return ToolChoice("named", name)


def call_beginnings(tools: Sequence[Tool], choice: ToolChoice, syntax: Syntax) -> tuple[str, ...]:
    """Return the texts with which a call may be begun for an answer that stalled, one a tool.

    A text names the tool and its first parameter. A tool that is demanded or preferred is the only
    one. Left out are tools whose name or first parameter might be read as markup.
    """
    if choice.kind == "none":
        return ()
    wanted = [tool for tool in tools if tool.name == (choice.name or PREFERRED)] or tools
    pairs = [(tool.name, tool.first_parameter) for tool in wanted]
    safe = [pair for pair in pairs if all(SAFE.fullmatch(n) for n in pair if n is not None)]
    return tuple(syntax.begin(name, parameter) for name, parameter in safe)


def typed_value(text: str, tool: Tool | None, parameter: str) -> Any:
    """The value of an XML parameter, by the type its tool declares; a text if that fails."""
    kinds = kinds_of(tool, parameter)
    if text == "null":
        return None
    if not kinds or "string" in kinds:
        return text
    if "boolean" in kinds and (word := text.strip().lower()) in ("true", "false"):
        return word == "true"
    return parse_json(text, text)


def parse_json(text: str, otherwise: Any) -> Any:
    """The value of a JSON text; something else where it is none, or none that may be written."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return otherwise
    return otherwise if is_deep(found) else found


def is_deep(value: Any) -> bool:
    """Whether lists and mappings of a JSON value are nested more than `MOST_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True


def kinds_of(tool: Tool | None, parameter: str) -> set[str]:
    """Types that a tool's parameter may have; empty if its schema does not say."""
    kinds: set[str] = set()
    todo, met = [tool.properties.get(parameter)] if tool else [], set()
    while tool and todo:
        if not isinstance(schema := todo.pop(), Mapping):
            continue
        if (kind := schema.get("type")) is not None:
            kinds.update(k for k in (kind if isinstance(kind, list) else [kind]) if type(k) is str)
        elif isinstance(values := schema.get("enum"), list):
            kinds.update(name for name, types in KINDS.items() for v in values if type(v) in types)
        for word in ("anyOf", "oneOf", "allOf"):
            todo += parts if isinstance(parts := schema.get(word), list) else ()
        if isinstance(place := schema.get("$ref"), str) and place not in met:
            met.add(place)
            todo.append(_resolve_reference(tool.parameters, place))
    return kinds


def _resolve_reference(schema: Any, place: str) -> Any:
    """What a reference such as #/$defs/NAME means."""
    for step in place.removeprefix("#/").split("/"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema
