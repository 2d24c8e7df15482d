"""Output items of the Responses API."""

from typing import Any


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
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Return an item with a tool call; `arguments` is JSON text."""
    head = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
    return head | {"arguments": arguments, "status": status}


# By type of item: its function, the prefix of its id, and the arguments of an empty item.
BEGINNINGS: dict[str, tuple[Any, ...]] = {
    "message": (message_item, "msg_", "", []),
    "reasoning": (reasoning_item, "rs_", ""),
    "function_call": (call_item, "fc_", ""),
}
