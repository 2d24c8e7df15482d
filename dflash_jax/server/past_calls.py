"""Past tool calls of other kinds than functions, with their results, as calls of functions."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_jax.server.conversation import result_texts, text_within, with_failure
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.tools import PARAMETER, joined_name

Block = Mapping[str, Any]
# Items whose call has its arguments in one field, with the name of the function.
ARGUMENTS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
# Items of tools that ran on a server, which have their results: the fields of the arguments.
SERVER_CALLS = {
    "code_interpreter_call": ("code",),
    "file_search_call": ("queries",),
    "mcp_call": ("arguments",),
    "web_search_call": ("action",),
    "image_generation_call": (),  # its result is an image
}
RESULTS = ("output", "outputs", "results", "error")
SERVER_USES = ("server_tool_use", "mcp_tool_use")  # of Anthropic


class PastCall(NamedTuple):
    """A call as a function, and its result if that is known from the same item."""

    name: str
    arguments: Any  # JSON text or a value
    result: str | None = None


def item_call(item: Block, where: str) -> PastCall | None:
    """Return the call of an item of the Responses API; None if it is no call, or has no content.

    Raises:
      Problem: the item has no name.
    """
    kind, result = str(item.get("type")), None
    match kind:
        case "function_call":
            arguments = item.get("arguments", "{}")
        case "custom_tool_call":
            given = item.get("input")
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            arguments = {PARAMETER: text}
        case _ if kind in ARGUMENTS:
            name, field = ARGUMENTS[kind]
            return PastCall(name, _filled(item.get(field)))
        case _ if kind in SERVER_CALLS:
            given = {field: item.get(field) for field in SERVER_CALLS[kind]}
            result = text_within([item.get(field) for field in RESULTS])
            if kind == "mcp_call":
                arguments = given["arguments"]
                failed = item.get("error") is not None
                result = str(with_failure(result)) if failed else result
            elif not (result or given.get("code")):  # the result is in the text that follows
                return None
            else:
                return PastCall(kind.removesuffix("_call"), _filled(given), result)
        case _:
            return None
    if not isinstance(name := item.get("name"), str):
        raise Problem(400, f"a {kind} has no name", param=f"{where}.name")
    return PastCall(joined_name(item.get("namespace"), name), arguments, result)


def item_result(item: Block, where: str, warnings: list[str]) -> Message | None:
    """Return the result of a call in an item of the Responses API; None if it is no result.

    Raises:
      Problem: a function's result has media.
    """
    kind = item.get("type")
    if not (isinstance(kind, str) and kind.endswith("_output")):
        return None
    failed = item.get("status") == "failed"
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = result_texts(item.get("output"), f"{where}.output", warnings, failed=failed)
    else:
        content = text_within([item.get("output"), item.get("tools")])
        content = with_failure(content) if failed else content
        if kind == "computer_call_output":
            warnings.append("an output of type 'computer_call_output' was named, but not read")
    # Outputs of local shells have the id of the call in another field.
    call_id = item.get("call_id") or item.get("id")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def block_call(block: Block, place: str, warnings: list[str]) -> dict[str, Any] | None:
    """Return the call of an Anthropic content block; None if it is none.

    Raises:
      Problem: the block has no name.
    """
    kind = block.get("type")
    if kind != "tool_use" and kind not in SERVER_USES:
        return None
    name = block.get("name")
    if not isinstance(name, str):
        raise Problem(400, f"a {kind} has no name", param=f"{place}.name")
    if kind in SERVER_USES:
        warnings.append(f"a block of type {kind!r} was read as a call of the tool {name[:150]!r}")
    return call_entry(block.get("id"), name, block.get("input") or {})


def block_result(block: Block, place: str, warnings: list[str]) -> Message | None:
    """Return the result of a call in an Anthropic content block; None if it is none.

    Raises:
      Problem: the result of a client's tool has media.
    """
    kind, content = block.get("type"), block.get("content")
    if not (isinstance(kind, str) and kind.endswith("tool_result")):
        return None
    failed = block.get("is_error") is True
    if kind == "tool_result":
        texts = result_texts(content, f"{place}.content", warnings, failed=failed)
    else:
        texts = text_within(content)
        failed = failed or (isinstance(content, Mapping) and "error_code" in content)
        texts = with_failure(texts) if failed else texts
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def call_entry(call_id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a function in the format of chat completions."""
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _filled(value: Any) -> Any:
    """Return an object without its empty fields; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    known = {key: inner for key, inner in value.items() if inner is not None and inner != {}}
    return {key: inner for key, inner in known.items() if (key, inner) != ("type", "exec")}
