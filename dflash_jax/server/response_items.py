"""Output items of the Responses API."""

from typing import Any

from dflash_jax.server.freeform import freeform_input
from dflash_jax.server.protocol import ClientTool
from dflash_jax.tool_parsers.tool_schema import parse_json


def message_item(
    item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    """Return an item with the text of an answer."""
    head = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return head | {"content": [part]}


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
    head = {"id": item_id, "type": CALL_TYPES[tool.kind], "call_id": call_id}
    if tool.kind not in ("function", "custom"):
        return head | _payload(tool.kind, parse_json(arguments, {})) | {"status": status}
    head |= {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
    if tool.kind == "custom":
        return head | {"input": freeform_input(arguments), "status": status}
    return head | {"arguments": arguments, "status": status}


def is_call(item: dict[str, Any]) -> bool:
    """Return whether an output item is a tool call."""
    return item["type"] in CALL_TYPES.values()


def _payload(kind: str, given: Any) -> dict[str, Any]:
    """Return the field with what the client is to do, for a call of a built-in tool."""
    given = given if isinstance(given, dict) else {}
    if kind == "apply_patch":
        return {"operation": {"type": "update_file", "path": "", "diff": ""} | given}
    field, shell = ("commands", []) if kind == "shell" else ("command", ["bash", "-lc"])
    commands = given.get(field, [])
    if isinstance(commands, str):
        commands = [*shell, commands]
    commands = list(map(str, commands)) if isinstance(commands, list) else []
    if kind == "shell":
        rest = {key: given.get(key) for key in ("timeout_ms", "max_output_length")}
        return {"action": {"commands": commands} | rest}
    env = given.get("env")
    env = {k: str(v) for k, v in env.items()} if isinstance(env, dict) else {}
    rest = {key: given.get(key) for key in ("timeout_ms", "user", "working_directory")}
    return {"action": {"type": "exec", "command": commands, "env": env} | rest}


# By kind of tool: the types of its calls, and the prefixes of their ids.
CALL_TYPES = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
}
CALL_PREFIXES = {
    "function": "fc_",
    "custom": "ctc_",
    "local_shell": "lsh_",
    "shell": "sh_",
    "apply_patch": "apc_",
}
# By type of item: its function, the prefix of its id, and the arguments of an empty item.
BEGINNINGS: dict[str, tuple[Any, ...]] = {
    "message": (message_item, "msg_", "", []),
    "reasoning": (reasoning_item, "rs_", ""),
}
