"""Anthropic's messages and their content blocks, in the chat completions shape."""

import json
from collections.abc import Sequence
from typing import Any

from dflash_jax.server.conversation import check_messages, text_of, texts_of
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.thinking import thought_of

BILLING = "x-anthropic-billing-header:"  # a line that some clients send; new with every request
System = str | list[dict[str, Any]] | None


def is_begun(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer: an assistant's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list):
        return (
            last.get("role") == "assistant"
            and bool(content)
            and all(isinstance(block, dict) and block.get("type") == "text" for block in content)
        )
    return last.get("role") == "assistant" and isinstance(content, str)


def messages_of(system: System, messages: Sequence[dict[str, Any]]) -> list[Message]:
    """The conversation in the chat completions shape."""
    check_messages(messages)
    made: list[Message] = []
    if kept := _without_billing(system):
        made.append({"role": "system", "content": texts_of(kept, "system")})
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages[{at}]"
        if role not in ("user", "assistant", "system"):
            raise Problem(400, f"role {role!r}; expected user or assistant", param=f"{where}.role")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
            continue
        if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
            raise Problem(400, "content is no list of blocks", param=f"{where}.content")
        made += _turn(role, content, f"{where}.content")
    return made


def _without_billing(system: System) -> System:
    """The system prompt without the line that would make every prompt a new one."""
    if not isinstance(system, list):
        return _unbilled(system or "")
    texts = [block.get("text") for block in system]
    kept = [_unbilled(text) if isinstance(text, str) else text for text in texts]
    return [
        block if new == old else block | {"text": new}
        for block, old, new in zip(system, texts, kept, strict=True)
        if new == old or new
    ]


def _unbilled(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _turn(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Tool results, then the message with everything else."""
    results: list[Message] = []
    thoughts: list[str] = []
    rest: Message = {"role": role, "content": []}
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        match block.get("type"):
            case "tool_result":
                content = texts_of(block.get("content") or "", f"{place}.content")
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
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                rest["content"].append(text_of([block], place))
    if thoughts:
        rest["reasoning_content"] = thought_of(*thoughts)
    if not rest["content"] and len(rest) == 2:
        return results
    return [*results, rest]
