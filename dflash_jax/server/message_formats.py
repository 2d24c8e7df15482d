"""Responses items and Anthropic content blocks, converted to chat completions messages."""

import json
from collections.abc import Sequence
from typing import Any

from dflash_jax.server.conversation import check_messages, content_text, content_texts, part_text
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.thinking import join_reasoning


def messages_from_responses(instructions: str | None, items: list[dict[str, Any]]) -> list[Message]:
    """Return the items of a Responses input as messages; adjacent calls become one turn.

    Raises:
      Problem: an item is invalid or not supported.
    """
    check_messages(items, "input")
    system: list[str] = [instructions] if instructions else []
    result: list[Message] = []
    reasoning: list[str] = []
    for at, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{at}]"
        if kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise Problem(400, "a function_call has no name", param=f"{where}.name")
            function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (result and result[-1]["role"] == "assistant"):
                result.append({"role": "assistant", "content": None})
            result[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = content_texts(item.get("output"), f"{where}.output")
            tool_result = {"role": "tool", "tool_call_id": item.get("call_id")}
            result.append(tool_result | {"content": output or ""})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            parts = parts if isinstance(parts, list) else []
            text = "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))
            reasoning.append(text)
            continue
        elif kind == "message":
            message = _message_of(item, where)
            if message["role"] == "assistant" and result and result[-1].get("tool_calls"):
                # Text after a call belongs to the same turn.
                if not isinstance(result[-1]["content"], list):
                    result[-1]["content"] = [result[-1]["content"] or ""]
                result[-1]["content"].append(message["content"])
            else:
                result.append(message)
        else:
            raise Problem(400, f"an item of type {kind!r} is not supported", param=where)
        if any(reasoning) and result[-1]["role"] == "assistant":
            result[-1].setdefault("reasoning_content", []).extend(reasoning)
        reasoning = []
    for message in result:
        if "reasoning_content" in message:
            message["reasoning_content"] = join_reasoning(*message["reasoning_content"])
    # Many templates accept a system message in the first place only.
    leading = [{"role": "system", "content": text} for text in system]
    leading += [m for m in result if m["role"] == "system"]
    return [*leading, *(m for m in result if m["role"] != "system")]


def _message_of(item: dict[str, Any], where: str) -> Message:
    """Return a message item as a chat completions message."""
    role, read = (
        item.get("role"),
        content_text if item.get("role") == "assistant" else content_texts,
    )
    content = read(item.get("content"), f"{where}.content")
    if role not in ("system", "developer", "user", "assistant"):
        known = "system, developer, user or assistant"
        raise Problem(400, f"role {role!r}; expected {known}", param=f"{where}.role")
    if content is None and role != "assistant":
        raise Problem(400, "content is missing", param=f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content or ""}


BILLING = "x-anthropic-billing-header:"  # some clients send it, different in every request
System = str | list[dict[str, Any]] | None


def continues_assistant(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is assistant text, which the output has to continue."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list):
        return (
            last.get("role") == "assistant"
            and bool(content)
            and all(isinstance(block, dict) and block.get("type") == "text" for block in content)
        )
    return last.get("role") == "assistant" and isinstance(content, str)


def messages_from_anthropic(system: System, messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return Anthropic's system prompt and messages as chat completions messages.

    Raises:
      Problem: a message or content block is invalid.
    """
    check_messages(messages)
    result: list[Message] = []
    if kept := _drop_billing(system):
        result.append({"role": "system", "content": content_texts(kept, "system")})
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages[{at}]"
        if role not in ("user", "assistant", "system"):
            raise Problem(400, f"role {role!r}; expected user or assistant", param=f"{where}.role")
        if isinstance(content, str):
            result.append({"role": role, "content": content})
            continue
        if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
            raise Problem(400, "content is no list of blocks", param=f"{where}.content")
        result += _turn(role, content, f"{where}.content")
    return result


def _drop_billing(system: System) -> System:
    """Return the system prompt without the billing line, which would defeat prefix caching."""
    if not isinstance(system, list):
        return _drop_billing_line(system or "")
    texts = [block.get("text") for block in system]
    kept = [_drop_billing_line(text) if isinstance(text, str) else text for text in texts]
    return [
        block if new == old else block | {"text": new}
        for block, old, new in zip(system, texts, kept, strict=True)
        if new == old or new
    ]


def _drop_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _turn(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Return the messages of one turn: tool results first, then everything else."""
    results: list[Message] = []
    reasoning: list[str] = []
    rest: Message = {"role": role, "content": []}
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        match block.get("type"):
            case "tool_result":
                content = content_texts(block.get("content") or "", f"{place}.content")
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append(result | {"content": content})
            case "tool_use":
                name = block.get("name")
                if not isinstance(name, str):
                    raise Problem(400, "a tool_use has no name", param=f"{place}.name")
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                call = {"id": block.get("id"), "type": "function", "function": function}
                rest.setdefault("tool_calls", []).append(call)
            case "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                rest["content"].append(part_text(block, place))
    if reasoning:
        rest["reasoning_content"] = join_reasoning(*reasoning)
    if not rest["content"] and len(rest) == 2:
        return results
    return [*results, rest]
