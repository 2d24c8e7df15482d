"""The items of a Responses input, as messages in the chat completions shape."""

from typing import Any

from dflash_jax.server.conversation import check_messages, text_of, texts_of
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.thinking import thought_of


def messages_of(instructions: str | None, items: list[dict[str, Any]]) -> list[Message]:
    """The conversation in the chat completions shape; neighbouring calls are one turn."""
    check_messages(items, "input")
    system: list[str] = [instructions] if instructions else []
    made: list[Message] = []
    thoughts: list[str] = []
    for at, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{at}]"
        if kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise Problem(400, "a function_call has no name", param=f"{where}.name")
            function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (made and made[-1]["role"] == "assistant"):
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = texts_of(item.get("output"), f"{where}.output")
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            made.append(result | {"content": output or ""})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            parts = parts if isinstance(parts, list) else []
            text = "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))
            thoughts.append(text)
            continue
        elif kind == "message":
            message = _message_of(item, where)
            if message["role"] == "assistant" and made and made[-1].get("tool_calls"):
                # What is said behind a call is of the same turn.
                if not isinstance(made[-1]["content"], list):
                    made[-1]["content"] = [made[-1]["content"] or ""]
                made[-1]["content"].append(message["content"])
            else:
                made.append(message)
        else:
            raise Problem(400, f"an item of type {kind!r} is not supported", param=where)
        if any(thoughts) and made[-1]["role"] == "assistant":
            made[-1].setdefault("reasoning_content", []).extend(thoughts)
        thoughts = []
    for message in made:
        if "reasoning_content" in message:
            message["reasoning_content"] = thought_of(*message["reasoning_content"])
    # One system message leads: many templates accept no other place.
    leading = [{"role": "system", "content": text} for text in system]
    leading += [m for m in made if m["role"] == "system"]
    return [*leading, *(m for m in made if m["role"] != "system")]


def _message_of(item: dict[str, Any], where: str) -> Message:
    """An item of type message in the chat completions shape."""
    role, read = item.get("role"), text_of if item.get("role") == "assistant" else texts_of
    content = read(item.get("content"), f"{where}.content")
    if role not in ("system", "developer", "user", "assistant"):
        known = "system, developer, user or assistant"
        raise Problem(400, f"role {role!r}; expected {known}", param=f"{where}.role")
    if content is None and role != "assistant":
        raise Problem(400, "content is missing", param=f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content or ""}
