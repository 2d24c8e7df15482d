"""Validation and normalization of tools, freeform ones among them, and tool choices."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.server.freeform import freeform_function
from dflash_jax.server.protocol import ClientTool, Problem
from dflash_jax.tool_parsers.tool_schema import CHOICES, Tool, ToolChoice, choice_of, tools_of

MOST_TOOLS = 1024
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # recovery starts no call with over 64 characters


def _function(description: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """Return a function without its name; `properties` are schemas of its arguments."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"description": description, "parameters": schema}


TEXTS = {"type": "array", "items": {"type": "string"}}
# Tools of Responses that the client runs, with the functions by which the model calls them.
BUILT_IN: dict[Any, dict[str, Any]] = {
    "local_shell": _function(
        "Run a command on the user's computer, and return its output.",
        ["command"],
        command=TEXTS,
        working_directory={"type": "string"},
        timeout_ms={"type": "integer"},
        env={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    "shell": _function(
        "Run commands in the user's shell, and return their outputs.",
        ["commands"],
        commands=TEXTS,
        timeout_ms={"type": "integer"},
        max_output_length={"type": "integer"},
    ),
    "apply_patch": _function(
        "Create, update or delete a file of the user by a diff.",
        ["type", "path"],
        type={"enum": ["create_file", "update_file", "delete_file"]},
        path={"type": "string"},
        diff={"type": "string"},
    ),
}
CLIENT_TYPES = ("function", "custom", "namespace", *BUILT_IN)


@dataclasses.dataclass
class DeclaredTools:
    """A request's tools as functions, while they are converted.

    Attributes:
      functions: definitions in the chat completions format.
      places: paths of the functions in the request, for errors.
      client_tools: tools that are no plain functions for the client, by name.
      warnings: definitions that are ignored in whole or in part, as sentences.
      names: names of the functions.
    """

    functions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    client_tools: dict[str, ClientTool] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)

    def add(self, function: dict[str, Any], place: str, tool: ClientTool | None = None) -> None:
        """Add a function, and how the client declared it if it differs."""
        name = function.get("name")
        if isinstance(name, str):
            if name in self.names:
                self.warnings.append(f"a second tool of the name {name[:150]!r} was ignored")
                return
            self.names.add(name)
        self.functions.append({"type": "function", "function": function})
        self.places.append(place)
        if tool is not None and isinstance(name, str):
            self.client_tools[name] = tool

    def add_freeform(
        self, tool: Mapping[str, Any], place: str, namespace: str | None = None
    ) -> None:
        """Add a freeform tool as a function of one string."""
        name = tool.get("name")
        function, warning = freeform_function(
            joined_name(namespace, name), tool.get("description"), tool.get("format")
        )
        self.add(function, place, ClientTool("custom", str(name), namespace))
        if warning is not None:
            self.warnings.append(warning)


def joined_name(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a tool of a namespace."""
    if not (namespace and isinstance(namespace, str) and isinstance(name, str)):
        return name
    separator = "" if namespace.endswith("_") else "__"
    return namespace + separator + name


def chat_tools(tools: Sequence[Any] | None) -> DeclaredTools:
    """Return the tools of chat completions, the freeform ones as functions."""
    check_tools(tools)
    declared = DeclaredTools()
    for at, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            body = tool.get("custom")
            if not isinstance(body, Mapping):
                body = tool
            declared.add_freeform(body, f"tools[{at}].custom")
        else:  # with all fields that the client set
            declared.functions.append(tool)
            declared.places.append(f"tools[{at}].function")
            declared.names.update(parsed.name for parsed in tools_of([tool]))
    return declared


def responses_tools(tools: Sequence[dict[str, Any]] | None) -> DeclaredTools:
    """Return the tools of Responses as functions; tools that would run on a server are ignored."""
    check_tools(tools)
    declared = DeclaredTools()
    _add_responses_tools(declared, tools or (), "tools", None)
    return declared


def _add_responses_tools(
    declared: DeclaredTools, tools: Sequence[Any], path: str, namespace: str | None
) -> None:
    """Add tools of Responses; `path` is where they are in the request."""
    for at, tool in enumerate(tools):
        place = f"{path}[{at}]"
        match tool.get("type") if isinstance(tool, Mapping) else None:
            case "function":
                keys = ("name", "description", "parameters", "strict")
                function = {key: tool[key] for key in keys if tool.get(key) is not None}
                client_tool = None
                if namespace:
                    client_tool = ClientTool("function", str(tool.get("name")), namespace)
                    if "name" in function:
                        function["name"] = joined_name(namespace, function["name"])
                declared.add(function, place, client_tool)
            case "custom":
                declared.add_freeform(tool, place, namespace)
            case str(kind) if kind in BUILT_IN and not _is_hosted(tool):
                declared.add({"name": kind} | BUILT_IN[kind], place, ClientTool(kind, kind))
            case "namespace" if namespace is None:
                inner = tool.get("tools")
                name = tool.get("name")
                if not (isinstance(inner, list) and name and isinstance(name, str)):
                    raise Problem(f"{place} has no name and list of tools", param=place)
                _add_responses_tools(declared, inner, f"{place}.tools", name)
            case kind:
                declared.warnings.append(f"the tool type {kind!r:.99} was ignored")


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether a shell runs in a container of a server."""
    environment = tool.get("environment")
    return isinstance(environment, Mapping) and environment.get("type") != "local"


def responses_choice(choice: Any, declared: DeclaredTools) -> Any:
    """Return the `tool_choice` of Responses in the format of chat completions.

    Raises:
      Problem: 400, it names a tool that would run on a server.
    """
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return dict(choice) | {"tools": [_named(entry) for entry in choice.get("tools") or ()]}
    named = _named(choice)
    is_usual = kind in (None, "function", "custom", "tool", *CHOICES)
    if is_usual or named["name"] in declared.client_tools:
        return named
    raise Problem(
        f"tool_choice names a tool of type {kind!r:.99}, which does not run here; choose a declared"
        " function or custom tool, or 'auto'",
        param="tool_choice",
    )


def _named(entry: Any) -> dict[str, Any]:
    """Return a tool of a choice with the name by which the model calls it."""
    if not isinstance(entry, Mapping):
        return {"name": None}
    kind = entry.get("type")
    # The kind may be of any type, also one without a hash.
    name = kind if kind in tuple(BUILT_IN) else entry.get("name")
    return dict(entry) | {"name": joined_name(entry.get("namespace"), name)}


def parse_tools(
    tools: list[dict[str, Any]] | None, choice: Any, places: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], tuple[Tool, ...], ToolChoice]:
    """Return the tools for the chat template, the tools that calls are checked against, the choice.

    Args:
      tools: function definitions in the chat completions format.
      choice: `tool_choice`, in the same format.
      places: paths of the functions in the request, for errors; `tools[0].function` and so on by
        default.

    Raises:
      Problem: 400, a tool is no function with a usable name, or the choice fits no tool.
    """
    tools = tools or []
    check_tools(tools)
    for at, tool in enumerate(tools):
        where = places[at] if places else f"tools[{at}].function"
        inner = tool.get("function")
        name = inner.get("name") if isinstance(inner, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str):
            where = where.removesuffix(".function")
            raise Problem(f"{where} is no function with a name", param=where)
        if not NAME.fullmatch(name):
            raise Problem(
                f"the tool name {name[:150]!r}: expected 1 to 128 letters, digits, '_', '.', '-'",
                param=f"{where}.name",
            )
    declared = tools_of(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        declared, choice = _allowed_tools(choice, declared)
    if isinstance(choice, str) and choice not in CHOICES:
        raise Problem(
            f"tool_choice is {choice!r}; expected none, auto, required or a function",
            param="tool_choice",
        )
    if isinstance(choice, Mapping):
        custom = choice.get("custom")
        if isinstance(custom, Mapping):
            choice = {"name": custom.get("name")}
    try:
        chosen = choice_of(choice or "auto", declared)
    except RequestError as error:
        raise Problem(str(error), param="tool_choice") from None
    if chosen.kind in ("required", "named") and not declared:
        raise Problem("tool_choice demands a call, but no tools were given", param="tool_choice")
    if chosen.kind == "none":
        return [], (), chosen
    return tools, declared, chosen


def tool_arguments(declared: DeclaredTools, choice: Any) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` about tools, from `tool_choice` as for chat.

    Raises:
      Problem: as `parse_tools`.
    """
    tools, declared_tools, tool_choice = parse_tools(declared.functions, choice, declared.places)
    return {
        "tools": tools,
        "declared_tools": declared_tools,
        "client_tools": declared.client_tools,
        "tool_choice": tool_choice,
    }


def check_tools(tools: Sequence[Any] | None) -> None:
    """Refuse too many tools.

    Raises:
      Problem: 400, there are more than `MOST_TOOLS`.
    """
    if tools is not None and len(tools) > MOST_TOOLS:
        raise Problem(f"{len(tools)} tools were given; at most {MOST_TOOLS}", param="tools")


def _allowed_tools(
    choice: Mapping[str, Any], declared: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that `allowed_tools` permits to be called, and its mode."""
    body = choice.get("allowed_tools", choice)
    if not isinstance(body, Mapping):
        body = {}
    entries = body.get("tools")
    if not isinstance(entries, list):
        entries = []
    names = {tool.name for tool in tools_of([_without_custom(entry) for entry in entries])}
    mode = body.get("mode", "auto")
    if not names or names - {tool.name for tool in declared} or mode not in ("auto", "required"):
        raise Problem(
            "tool_choice allows no declared tool, or has another mode than auto and required",
            param="tool_choice",
        )
    return tuple(tool for tool in declared if tool.name in names), mode


def _without_custom(entry: Any) -> Any:
    """Return a freeform tool of a choice as its inner object; other entries as they are."""
    custom = entry.get("custom") if isinstance(entry, Mapping) else None
    return custom if isinstance(custom, Mapping) else entry
