"""Validation and normalization of tools, freeform ones among them, and tool choices."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import ClientTool, Problem
from dflash_jax.tokenizer import well_formed
from dflash_jax.tool_parsers.tool_schema import CHOICES, Tool, ToolChoice, choice_of, tools_of

# Freeform (custom) tools: functions of one string, whose calls are answered as plain text.

PARAMETER = "input"
HEAD = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
LETTERS = re.compile(r'[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}')
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")


def freeform_function(name: Any, description: Any, form: Any) -> tuple[dict[str, Any], str | None]:
    """Return the function by which the model calls a freeform tool, and a warning.

    Args:
      form: the tool's `format`: text, or a grammar, which the model is shown but not held to.
    """
    about, warning = "The text that the tool takes.", None
    form = form if isinstance(form, Mapping) else {}
    inner = form.get("grammar", form)  # nested in chat completions
    if form.get("type") == "grammar" and isinstance(inner, Mapping):
        about = (
            f"The text that the tool takes, in this {inner.get('syntax')} grammar:\n"
            f"{inner.get('definition')}"
        )
        warning = f"the input of the tool {name!r} is not held to its grammar"
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = {
        "type": "object",
        "properties": {PARAMETER: {"type": "string", "description": about}},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    return function, warning


def freeform_input(arguments: str) -> str:
    """Return the text of a freeform tool's call; arguments of another form are the text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return FreeformInput().push(arguments) or arguments
    if isinstance(value, dict) and isinstance(text := value.get(PARAMETER), str):
        return well_formed(text)
    return "" if value in ({}, None) else arguments


class FreeformInput:
    """Decodes the text of a freeform tool's call while its arguments arrive.

    Attributes:
      text: decoded so far.
    """

    def __init__(self) -> None:
        self._pending = ""  # JSON that is not decoded yet
        self._inside = self._ended = False  # the text's string began, and ended
        self.text = ""

    def push(self, part: str) -> str:
        """Add a part of the arguments, and return the text that it completes."""
        if self._ended:
            return ""
        self._pending += part
        if not self._inside:
            if (head := HEAD.match(self._pending)) is None:
                return ""
            self._pending, self._inside = self._pending[head.end() :], True
        letters, at = [], 0
        while letter := LETTERS.match(self._pending, at):
            letters.append(letter[0])
            at = letter.end()
        self._ended = self._pending.startswith('"', at)
        if letters and HIGH_SURROGATE.match(letters[-1]) and not self._ended:
            at -= len(letters.pop())  # the other half may follow
        self._pending = self._pending[at:]
        new = well_formed(json.loads(f'"{"".join(letters)}"', strict=False))
        self.text += new
        return new

    def finish(self, arguments: str) -> str:
        """Return the rest of the text, given the complete arguments."""
        whole = freeform_input(arguments)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest


MOST_TOOLS = 1024
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # recovery starts no call with over 64 characters


def _function(description: str, required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required.split()}
    return {"description": description, "parameters": schema}


TEXTS = {"type": "array", "items": {"type": "string"}}
# Tools of Responses that the client runs, with the functions by which the model calls them.
BUILT_IN: dict[Any, dict[str, Any]] = {
    "local_shell": _function(
        "Run a command on the user's computer, and return its output.",
        "command",
        command=TEXTS,
        working_directory={"type": "string"},
        timeout_ms={"type": "integer"},
        env={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    "shell": _function(
        "Run commands in the user's shell, and return their outputs.",
        "commands",
        commands=TEXTS,
        timeout_ms={"type": "integer"},
        max_output_length={"type": "integer"},
    ),
    "apply_patch": _function(
        "Create, update or delete a file of the user by a diff.",
        "type path",
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
      places: their paths in the request, for errors.
      client_tools: those that are no plain functions for the client, by name.
      warnings: definitions, or parts of them, that are ignored.
      names: of the functions.
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
        self.warnings += [warning] if warning else []


def joined_name(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a tool of a namespace."""
    if not (namespace and isinstance(namespace, str) and isinstance(name, str)):
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


def chat_tools(tools: Sequence[Any] | None) -> DeclaredTools:
    """Return the tools of chat completions, the freeform ones as functions."""
    check_tools(tools)
    found = DeclaredTools()
    for at, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            body = tool.get("custom")
            place = f"tools[{at}].custom"
            found.add_freeform(body if isinstance(body, Mapping) else tool, place)
        else:  # with all fields that its client gave
            found.functions.append(tool)
            found.places.append(f"tools[{at}].function")
            found.names.update(declared.name for declared in tools_of([tool]))
    return found


def responses_tools(tools: Sequence[dict[str, Any]] | None) -> DeclaredTools:
    """Return the tools of Responses as functions; tools that would run on a server are ignored."""
    check_tools(tools)
    found = DeclaredTools()
    _add_responses_tools(found, tools or (), "tools", None)
    return found


def _add_responses_tools(
    found: DeclaredTools, tools: Sequence[Any], path: str, namespace: str | None
) -> None:
    for at, tool in enumerate(tools):
        place = f"{path}[{at}]"
        match tool.get("type") if isinstance(tool, Mapping) else None:
            case "function":
                keys = ("name", "description", "parameters", "strict")
                function = {key: tool[key] for key in keys if tool.get(key) is not None}
                called = ClientTool("function", str(tool.get("name")), namespace)
                if namespace and "name" in function:
                    function["name"] = joined_name(namespace, function["name"])
                found.add(function, place, called if namespace else None)
            case "custom":
                found.add_freeform(tool, place, namespace)
            case str(kind) if kind in BUILT_IN and not _is_hosted(tool):
                found.add({"name": kind} | BUILT_IN[kind], place, ClientTool(kind, kind))
            case "namespace" if namespace is None:
                inner, name = tool.get("tools"), tool.get("name")
                if not (isinstance(inner, list) and name and isinstance(name, str)):
                    raise Problem(f"{place} has no name and list of tools", param=place)
                _add_responses_tools(found, inner, f"{place}.tools", name)
            case kind:
                found.warnings.append(f"the tool type {kind!r:.99} was ignored")


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether a shell runs in a container of a server."""
    environment = tool.get("environment")
    return isinstance(environment, Mapping) and environment.get("type") != "local"


def responses_choice(choice: Any, found: DeclaredTools) -> Any:
    """Return the `tool_choice` of Responses in the format of chat completions."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return dict(choice) | {"tools": [_named(entry) for entry in choice.get("tools") or ()]}
    named = _named(choice)
    if (
        kind in (None, "function", "custom", "tool", *CHOICES)
        or named["name"] in found.client_tools
    ):
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
    name = kind if kind in tuple(BUILT_IN) else entry.get("name")
    return {**entry, "name": joined_name(entry.get("namespace"), name)}


def parse_tools(
    tools: list[dict[str, Any]] | None, choice: Any, places: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], tuple[Tool, ...], ToolChoice]:
    """Return the tools for the chat template, the tools that calls are checked against, the choice.

    Args:
      tools: function definitions in the chat completions format.
      choice: `tool_choice`, in the same format.
      places: paths of the functions in the request, for errors; `tools[0].function` and so on by
        default.
    """
    given = tools or []
    check_tools(given)
    for at, tool in enumerate(given):
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
    declared = tools_of(given)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        declared, choice = _allowed_tools(choice, declared)
    if isinstance(choice, str) and choice not in CHOICES:
        raise Problem(
            f"tool_choice is {choice!r}; expected none, auto, required or a function",
            param="tool_choice",
        )
    if isinstance(choice, Mapping) and isinstance(body := choice.get("custom"), Mapping):
        choice = {"name": body.get("name")}
    try:
        chosen = choice_of(choice or "auto", declared)
    except RequestError as error:
        raise Problem(str(error), param="tool_choice") from None
    if chosen.kind in ("required", "named") and not declared:
        raise Problem("tool_choice demands a call, but no tools were given", param="tool_choice")
    if chosen.kind == "none":
        return [], (), chosen
    return given, declared, chosen


def tool_arguments(found: DeclaredTools, choice: Any) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` about tools, given `tool_choice` as for chat."""
    tools, declared, chosen = parse_tools(found.functions, choice, found.places)
    return {
        "tools": tools,
        "declared_tools": declared,
        "client_tools": found.client_tools,
        "tool_choice": chosen,
    }


def check_tools(given: Sequence[Any] | None) -> None:
    """Refuse too many tools."""
    if given is not None and len(given) > MOST_TOOLS:
        raise Problem(f"{len(given)} tools were given; at most {MOST_TOOLS}", param="tools")


def _allowed_tools(
    choice: Mapping[str, Any], declared: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that `allowed_tools` permits to be called, and its mode."""
    body = choice.get("allowed_tools", choice)
    body = body if isinstance(body, Mapping) else {}
    listed = body.get("tools")
    entries = [
        inner
        if isinstance(entry, Mapping) and isinstance(inner := entry.get("custom"), Mapping)
        else entry
        for entry in (listed if isinstance(listed, list) else ())
    ]
    names, mode = {tool.name for tool in tools_of(entries)}, body.get("mode", "auto")
    if not names or names - {tool.name for tool in declared} or mode not in ("auto", "required"):
        raise Problem(
            "tool_choice allows no declared tool, or has another mode than auto and required",
            param="tool_choice",
        )
    return tuple(tool for tool in declared if tool.name in names), mode
