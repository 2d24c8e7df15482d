"""Responses items and Anthropic content blocks, converted to chat completions messages.

Arguments are named as in `conversation`.
"""

from collections.abc import Sequence
from typing import Any

from dflash_jax.server.contents import (
    THOUGHTS,
    content_text,
    content_texts,
    part_text,
    result_texts,
    thought_text,
)
from dflash_jax.server.conversation import check_messages
from dflash_jax.server.past_calls import (
    block_call,
    block_result,
    call_entry,
    item_call,
    item_result,
)
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.reasoning import join_reasoning

ENCRYPTED = "encrypted reasoning of past turns was left out"


def messages_from_responses(
    instructions: str | None, items: list[dict[str, Any]], warnings: list[str] | None = None
) -> list[Message]:
    """Return the items of a Responses input as messages; adjacent calls become one turn.

    Raises:
      Problem: 400, an item has another form, or holds more than text.
    """
    check_messages(items, "input")
    warnings = [] if warnings is None else warnings
    messages: list[Message] = []
    reasoning: list[str] = []  # texts of the items just before, which belong to the next turn
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        where = f"input[{at}]"
        server_result: Message | None = None
        if call := item_call(item, where):
            call_id = item.get("call_id") or item.get("id")
            _add_call(messages, call_entry(call_id, call.name, call.arguments))
            if call.result is not None:
                server_result = {"role": "tool", "tool_call_id": call_id, "content": call.result}
        elif result := item_result(item, where, warnings):
            messages.append(result)
        elif kind == "reasoning":
            reasoning.append(_reasoning_text(item, warnings))
            continue
        elif kind == "message":
            _add_message(messages, _message_of(item, where, warnings))
        else:
            warnings.append(f"an item of type {kind!r:.99} was left out: it has no text to be read")
            continue
        if any(reasoning) and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", []).extend(reasoning)
        reasoning = []
        if server_result is not None:
            messages.append(server_result)
    for message in messages:
        if isinstance(message.get("reasoning_content"), list):
            message["reasoning_content"] = join_reasoning(*message["reasoning_content"])
    return _system_messages_first(instructions, messages)


def _add_call(messages: list[Message], call: dict[str, Any]) -> None:
    """Add a call to the last message, if that is the assistant's, or as a turn of its own."""
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_message(messages: list[Message], message: Message) -> None:
    """Add a message; an assistant's text after a call belongs to the turn of the call."""
    if message["role"] != "assistant" or not messages or not messages[-1].get("tool_calls"):
        messages.append(message)
        return
    turn = messages[-1]
    if not isinstance(turn["content"], list):
        turn["content"] = [turn["content"] or ""]
    turn["content"].append(message["content"])


def _reasoning_text(item: dict[str, Any], warnings: list[str]) -> str:
    parts = item.get("content") or item.get("summary")
    if not isinstance(parts, list):
        parts = []
    text = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    if not text and item.get("encrypted_content"):
        warnings.append(ENCRYPTED)
    return text


def _system_messages_first(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Return instructions and system messages first: many templates accept no others."""
    system = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if instructions:
        system.insert(0, {"role": "system", "content": instructions})
    return [*system, *others]


def _message_of(item: dict[str, Any], where: str, warnings: list[str]) -> Message:
    """Return an item of type "message" in the format of chat completions."""
    role = item.get("role")
    content = item.get("content")
    place = f"{where}.content"
    if role not in ("system", "developer", "user", "assistant", "tool"):
        known = "system, developer, user or assistant"
        raise Problem(f"role {role!r}; expected {known}", param=f"{where}.role")
    if role == "tool":  # a message of chat completions
        text = result_texts(content, place, warnings)
        return {"role": role, "tool_call_id": item.get("tool_call_id"), "content": text}
    if role == "assistant":
        content = content_text(content, place, warnings)
    else:
        content = content_texts(content, place, warnings)
    if content is None and role != "assistant":
        raise Problem("content is missing", param=place)
    return {"role": "system" if role == "developer" else role, "content": content or ""}


BILLING = "x-anthropic-billing-header:"  # some clients send it, different in every request
System = str | list[dict[str, Any]] | None


def continues_assistant(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is an assistant's text or reasoning, to be continued."""
    if not messages or messages[-1].get("role") != "assistant":
        return False
    content = messages[-1].get("content")
    if not isinstance(content, list):
        return isinstance(content, str)
    return len(content) > 0 and all(map(_is_text_or_thought, content))


def _is_text_or_thought(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in ("text", *THOUGHTS)


def messages_from_anthropic(
    system: System, messages: Sequence[dict[str, Any]], warnings: list[str] | None = None
) -> list[Message]:
    """Return Anthropic's system prompt and messages as chat completions messages.

    Raises:
      Problem: 400, a message has another form, or holds more than text.
    """
    check_messages(messages)
    warnings = [] if warnings is None else warnings
    converted: list[Message] = []
    system = _without_billing(system)
    if system:
        converted.append({"role": "system", "content": content_texts(system, "system", warnings)})
    for at, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        where = f"messages[{at}]"
        if role == "developer":
            role = "system"
        if role not in ("user", "assistant", "system"):
            raise Problem(f"role {role!r}; expected user or assistant", param=f"{where}.role")
        if isinstance(content, str) or (content is None and role == "assistant"):
            converted.append({"role": role, "content": content or ""})
            continue
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise Problem("content is no list of blocks", param=f"{where}.content")
        converted += _turn(role, content, f"{where}.content", warnings)
    return converted


def _without_billing(system: System) -> System:
    """Return the system prompt without the billing line, which would defeat prefix caching."""
    if not isinstance(system, list):
        return _without_billing_line(system or "")
    blocks = []
    for block in system:
        text = block.get("text")
        if isinstance(text, str) and text.startswith(BILLING):
            text = _without_billing_line(text)
            if text:
                blocks.append(block | {"text": text})
        else:
            blocks.append(block)
    return blocks


def _without_billing_line(text: str) -> str:
    if not text.startswith(BILLING):
        return text
    _, _, rest = text.partition("\n")
    return rest


def _turn(
    role: str, blocks: list[dict[str, Any]], where: str, warnings: list[str]
) -> list[Message]:
    """Return the messages of one turn.

    Results of tools that a user sends come before everything else. Results in an assistant's turn
    are those of tools that ran on a server; they stay in their places, so that the turn becomes
    more than one message.
    """
    results: list[Message] = []
    turns: list[Message] = [{"role": role, "content": []}]
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        current = turns[-1]
        if call := block_call(block, place, warnings):
            current.setdefault("tool_calls", []).append(call)
        elif result := block_result(block, place, warnings):
            if role == "assistant":
                turns += [result, {"role": role, "content": []}]
            else:
                results.append(result)
        elif (thought := thought_text(block)) is not None:
            if block.get("type") == "redacted_thinking":
                warnings.append(ENCRYPTED)
            current["reasoning_content"] = join_reasoning(current.get("reasoning_content"), thought)
        elif (text := part_text(block, place, warnings)) is not None:
            current["content"].append(text)
    # A turn without content may still have calls or reasoning.
    filled = [turn for turn in turns if turn["content"] or len(turn) > 2]
    return [*results, *filled] or [{"role": role, "content": ""}]
