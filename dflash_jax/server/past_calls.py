"""Past tool calls of other kinds than functions, with their results, as calls of functions.

Arguments are named as in `conversation`.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_jax.server.contents import result_texts, text_within, with_failure
from dflash_jax.server.freeform import PARAMETER
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.tools import joined_name

Block = Mapping[str, Any]
# Items whose call has its arguments in one field, with the name of the function.
ARGUMENTS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
# Items of tools that ran on a server, which have their results, too: the fields of the arguments.
SERVER_CALLS = {
    "code_interpreter_call": ("code",),
    "file_search_call": ("queries",),
    "web_search_call": ("action",),
    "image_generation_call": (),  # its result is an image
}
RESULTS = ("output", "outputs", "results", "error")
SERVER_USES = ("server_tool_use", "mcp_tool_use")  # Anthropic's calls of tools on a server


class PastCall(NamedTuple):
    """A call as that of a function.

    Attributes:
      arguments: JSON text or a value.
      result: result of the call if the same item has it, else None.
    """

    name: str
    arguments: Any
    result: str | None = None


def item_call(item: Block, where: str) -> PastCall | None:
    """Return the call of an item of the Responses API; None if it is no call, or has no content.

    Raises:
      Problem: 400, the call names no tool.
    """
    kind = str(item.get("type"))
    match kind:
        case "function_call":
            return PastCall(_tool_name(item, kind, where), item.get("arguments", "{}"))
        case "custom_tool_call":
            text = item.get("input")
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False)
            return PastCall(_tool_name(item, kind, where), {PARAMETER: text})
        case "mcp_call":
            result = _server_result(item)
            if item.get("error") is not None:
                result = str(with_failure(result))
            return PastCall(_tool_name(item, kind, where), item.get("arguments"), result)
        case _ if kind in ARGUMENTS:
            name, field = ARGUMENTS[kind]
            return PastCall(name, _filled(item.get(field)))
        case _ if kind in SERVER_CALLS:
            arguments = {field: item.get(field) for field in SERVER_CALLS[kind]}
            result = _server_result(item)
            if not (result or arguments.get("code")):  # the result is in the text that follows
                return None
            return PastCall(kind.removesuffix("_call"), _filled(arguments), result)
    return None


def _tool_name(item: Block, kind: str, where: str) -> str:
    name = item.get("name")
    if not isinstance(name, str):
        raise Problem(f"a {kind} has no name", param=f"{where}.name")
    return joined_name(item.get("namespace"), name)


def _server_result(item: Block) -> str:
    return text_within([item.get(field) for field in RESULTS])


def item_result(item: Block, where: str, warnings: list[str]) -> Message | None:
    """Return the result of a call in an item of the Responses API; None if it is no result."""
    kind = item.get("type")
    if not (isinstance(kind, str) and kind.endswith("_output")):
        return None
    failed = item.get("status") == "failed"
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = result_texts(item.get("output"), f"{where}.output", warnings, failed=failed)
    else:
        content = text_within([item.get("output"), item.get("tools")])
        if failed:
            content = with_failure(content)
        if kind == "computer_call_output":
            warnings.append("an output of type 'computer_call_output' was named, but not read")
    # Outputs of local shells have the id of the call in another field.
    call_id = item.get("call_id") or item.get("id")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def block_call(block: Block, place: str, warnings: list[str]) -> dict[str, Any] | None:
    """Return the call of an Anthropic content block; None if it is none.

    Raises:
      Problem: 400, the call names no tool.
    """
    kind = block.get("type")
    if kind != "tool_use" and kind not in SERVER_USES:
        return None
    name = block.get("name")
    if not isinstance(name, str):
        raise Problem(f"a {kind} has no name", param=f"{place}.name")
    if kind in SERVER_USES:
        warnings.append(f"a block of type {kind!r} was read as a call of the tool {name[:150]!r}")
    return call_entry(block.get("id"), name, block.get("input") or {})


def block_result(block: Block, place: str, warnings: list[str]) -> Message | None:
    """Return the result of a call in an Anthropic content block; None if it is none."""
    kind = block.get("type")
    content = block.get("content")
    if not (isinstance(kind, str) and kind.endswith("tool_result")):
        return None
    failed = block.get("is_error") is True
    if kind == "tool_result":
        texts = result_texts(content, f"{place}.content", warnings, failed=failed)
    else:
        texts = text_within(content)
        if failed or (isinstance(content, Mapping) and "error_code" in content):
            texts = with_failure(texts)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def call_entry(call_id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a function in the format of chat completions."""
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _filled(value: Any) -> Any:
    """Return an object without empty fields and a shell's type; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    filled = {}
    for field, inner in value.items():
        is_shell_type = field == "type" and inner == "exec"
        if inner is not None and inner != {} and not is_shell_type:
            filled[field] = inner
    return filled
