"""Tool definitions and tool choices of all APIs, normalized, and values of typed parameters.

Chat completions nest a `function`, Responses are flat, and Anthropic has an `input_schema`.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.parameters import Meaning, Parameters

MOST_DEPTH = 200  # nesting of lists and mappings: json and templates are recursive
NULLS = ("null", "None")  # how templates write that a parameter has no value
UNREADABLE = "raw"  # the argument for the text of arguments that are no JSON object


@dataclasses.dataclass(frozen=True)
class Tool:
    """A declared tool.

    Attributes:
      parameters: JSON schema of the arguments.
      strict: arguments have to follow the whole schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @functools.cached_property
    def merged(self) -> Parameters:
        """Return what the schema says about parameters, wherever it says it."""
        return Parameters(self.parameters)

    @property
    def required(self) -> list[str]:
        """Return the names of the parameters that every call needs."""
        return self.merged.required

    @property
    def first_parameter(self) -> str | None:
        """Return the name of the first required parameter, else of the first one, or None."""
        return next(iter(self.required or self.properties), None)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Return the schemas of the parameters by name."""
        return self.merged.properties


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """A normalized `tool_choice`.

    Attributes:
      name: the required tool of a "named" choice.
    """

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
    """Return the functions among a request's `tools`; the first of each name counts."""
    by_name: dict[str, Tool] = {}
    for entry in declared if isinstance(declared, Sequence) else ():
        if not isinstance(entry, Mapping):
            continue
        body = entry["function"] if isinstance(entry.get("function"), Mapping) else entry
        name = body.get("name")
        schema = body.get("parameters", body.get("input_schema"))
        if isinstance(name, str) and name:
            schema = schema if isinstance(schema, Mapping) else {}
            by_name.setdefault(name, Tool(name, schema, body.get("strict") is True))
    return tuple(by_name.values())


def chat_tools(declared: Sequence[Any]) -> list[Any]:
    """Return a request's `tools` as chat templates expect them: functions in a `function` field."""
    tools = []
    for entry in declared:
        if isinstance(entry, Mapping) and "function" not in entry and entry.get("name"):
            function = {key: entry[key] for key in ("name", "description") if key in entry}
            function["parameters"] = entry.get("parameters", entry.get("input_schema", {}))
            entry = {"type": "function", "function": function}
        tools.append(entry)
    return tools


def choice_of(tool_choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return a request's `tool_choice`; missing and unknown values become "auto".

    Raises:
      RequestError: the choice names an undeclared tool.
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


def typed_value(text: str, tool: Tool | None, parameter: str) -> Any:
    """Return the value of an XML parameter by its declared type, or the text if that fails."""
    meaning = tool.merged.meaning(parameter) if tool else Meaning()
    for value in meaning.values or ():
        if text == parameter_text(value):
            return value
    kinds = meaning.kinds
    if text == "null" and not kinds:
        return None
    if text.strip() in NULLS and "null" in kinds:
        return None
    if not kinds or "string" in kinds:
        return text
    if "boolean" in kinds and (word := text.strip().lower()) in ("true", "false"):
        return word == "true"
    return parse_json(text, text)


def parameter_text(value: Any) -> str:
    """Return a value as XML parameters contain it: texts as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_json(text: str, otherwise: Any) -> Any:
    """Return the value of a JSON text, or `otherwise` if it is invalid, not finite or too deep."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return otherwise
    return otherwise if is_deep(value) else value


def call_arguments(arguments: Any) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a past call as an object, and whether they are one.

    Templates need an object. Other arguments, such as JSON that was cut off, become the argument
    `raw`, as text.

    Args:
      arguments: JSON text or its value.
    """
    value = arguments
    for _ in range(2):  # some clients encode them twice
        if isinstance(value, str) and value:
            value = parse_json(value, None)
    if isinstance(value, dict) and not is_deep(value):
        return value, True
    if arguments in (None, "", "null"):
        return {}, arguments != "null"
    text = arguments
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    return {UNREADABLE: text}, False


def is_deep(value: Any) -> bool:
    """Return whether a JSON value is nested more than `MOST_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True


def kinds_of(tool: Tool | None, parameter: str) -> frozenset[str]:
    """Return the JSON types that a parameter's schema allows; empty if it does not specify any."""
    return tool.merged.meaning(parameter).kinds if tool else frozenset()
