"""Output items of /v1/responses: messages, reasoning, and calls of every kind of tool."""

from collections.abc import Sequence
from typing import Any

from dflash_jax.server.freeform import freeform_input
from dflash_jax.server.protocol import ClientTool
from dflash_jax.tool_parsers.tool_schema import parse_json

# Types of call items, by kind of tool.
CALL_TYPES = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
}
# Prefixes of the ids of call items, by kind of tool.
CALL_PREFIXES = {
    "function": "fc_",
    "custom": "ctc_",
    "local_shell": "lsh_",
    "shell": "sh_",
    "apply_patch": "apc_",
}


def message_item(
    item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    """Return an item with the text of an answer."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def reasoning_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Return an item with reasoning."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(
    item_id: str, call_id: str, tool: ClientTool, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Return an item with a tool call of the kind that the client declared.

    Args:
      arguments: JSON text; empty where the call begins.
    """
    item: dict[str, Any] = {"id": item_id, "type": CALL_TYPES[tool.kind], "call_id": call_id}
    if tool.kind in ("function", "custom"):
        item["name"] = tool.name
        if tool.namespace:
            item["namespace"] = tool.namespace
    match tool.kind:
        case "function":
            item["arguments"] = arguments
        case "custom":
            item["input"] = freeform_input(arguments)
        case "apply_patch":
            item["operation"] = _patch_operation(_object(arguments))
        case "shell":
            item["action"] = _shell_action(_object(arguments))
        case "local_shell":
            item["action"] = _local_shell_action(_object(arguments))
    item["status"] = status
    return item


def is_call(item: dict[str, Any]) -> bool:
    """Return whether an output item is a tool call."""
    return item["type"] in CALL_TYPES.values()


def _object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, which is empty for anything else."""
    value = parse_json(arguments, {})
    return value if isinstance(value, dict) else {}


def _patch_operation(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "update_file", "path": "", "diff": ""} | arguments


def _shell_action(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "commands": _words(arguments.get("commands", []), shell=()),
        "timeout_ms": arguments.get("timeout_ms"),
        "max_output_length": arguments.get("max_output_length"),
    }


def _local_shell_action(arguments: dict[str, Any]) -> dict[str, Any]:
    variables = arguments.get("env")
    if not isinstance(variables, dict):
        variables = {}
    return {
        "type": "exec",
        "command": _words(arguments.get("command", []), shell=("bash", "-lc")),
        "env": {name: str(value) for name, value in variables.items()},
        "timeout_ms": arguments.get("timeout_ms"),
        "user": arguments.get("user"),
        "working_directory": arguments.get("working_directory"),
    }


def _words(commands: Any, shell: Sequence[str]) -> list[str]:
    """Return commands, or the words of one, as texts; a single text follows the shell's words."""
    if isinstance(commands, str):
        return [*shell, commands]
    return list(map(str, commands)) if isinstance(commands, list) else []
