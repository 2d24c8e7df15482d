"""Responses items and Anthropic content blocks, converted to chat completions messages.

Arguments are named as in `conversation`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.server.conversation import (
    THOUGHTS,
    check_messages,
    content_text,
    content_texts,
    part_text,
    result_texts,
    text_within,
    thought_text,
    with_failure,
)
from dflash_jax.server.fields import join_reasoning
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.tools import PARAMETER, joined_name

# Past tool calls of other kinds than functions, with their results, as calls of functions.

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
    """Return the call of an item of the Responses API; None if it is no call, or has no content."""
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
        raise Problem(f"a {kind} has no name", param=f"{where}.name")
    return PastCall(joined_name(item.get("namespace"), name), arguments, result)


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
        content = with_failure(content) if failed else content
        if kind == "computer_call_output":
            warnings.append("an output of type 'computer_call_output' was named, but not read")
    # Outputs of local shells have the id of the call in another field.
    call_id = item.get("call_id") or item.get("id")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def block_call(block: Block, place: str, warnings: list[str]) -> dict[str, Any] | None:
    """Return the call of an Anthropic content block; None if it is none."""
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


ENCRYPTED = "encrypted reasoning of past turns was left out"


def messages_from_responses(
    instructions: str | None, items: list[dict[str, Any]], warnings: list[str] | None = None
) -> list[Message]:
    """Return the items of a Responses input as messages; adjacent calls become one turn."""
    check_messages(items, "input")
    warnings = [] if warnings is None else warnings
    system: list[str] = [instructions] if instructions else []
    result: list[Message] = []
    reasoning: list[str] = []
    for at, item in enumerate(items):
        kind, where = item.get("type") or "message", f"input[{at}]"
        answer: Message | None = None
        if call := item_call(item, where):
            call_id = item.get("call_id") or item.get("id")
            if not (result and result[-1]["role"] == "assistant"):
                result.append({"role": "assistant", "content": None})
            entry = call_entry(call_id, call.name, call.arguments)
            result[-1].setdefault("tool_calls", []).append(entry)
            if call.result is not None:
                answer = {"role": "tool", "tool_call_id": call_id, "content": call.result}
        elif output := item_result(item, where, warnings):
            result.append(output)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            parts = parts if isinstance(parts, list) else []
            text = "".join(str(p.get("text") or "") for p in parts if isinstance(p, dict))
            reasoning.append(text)
            if not text and item.get("encrypted_content"):
                warnings.append(ENCRYPTED)
            continue
        elif kind == "message":
            message = _message_of(item, where, warnings)
            if message["role"] == "assistant" and result and result[-1].get("tool_calls"):
                # Text after a call belongs to the same turn.
                if not isinstance(result[-1]["content"], list):
                    result[-1]["content"] = [result[-1]["content"] or ""]
                result[-1]["content"].append(message["content"])
            else:
                result.append(message)
        else:
            warnings.append(f"an item of type {kind!r:.99} was left out: it has no text to be read")
            continue
        if any(reasoning) and result[-1]["role"] == "assistant":
            result[-1].setdefault("reasoning_content", []).extend(reasoning)
        reasoning = []
        if answer:
            result.append(answer)
    for message in result:
        if isinstance(message.get("reasoning_content"), list):
            message["reasoning_content"] = join_reasoning(*message["reasoning_content"])
    # Many templates accept a system message in the first place only.
    leading = [{"role": "system", "content": text} for text in system]
    leading += [m for m in result if m["role"] == "system"]
    return [*leading, *(m for m in result if m["role"] != "system")]


def _message_of(item: dict[str, Any], where: str, warnings: list[str]) -> Message:
    role, content, place = item.get("role"), item.get("content"), f"{where}.content"
    if role not in ("system", "developer", "user", "assistant", "tool"):
        known = "system, developer, user or assistant"
        raise Problem(f"role {role!r}; expected {known}", param=f"{where}.role")
    if role == "tool":  # as in chat completions
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
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list):
        kinds = [block.get("type") for block in content if isinstance(block, dict)]
        own = all(kind == "text" or kind in THOUGHTS for kind in kinds)
        return last.get("role") == "assistant" and len(kinds) == len(content) > 0 and own
    return last.get("role") == "assistant" and isinstance(content, str)


def messages_from_anthropic(
    system: System, messages: Sequence[dict[str, Any]], warnings: list[str] | None = None
) -> list[Message]:
    """Return Anthropic's system prompt and messages as chat completions messages."""
    check_messages(messages)
    warnings = [] if warnings is None else warnings
    result: list[Message] = []
    if kept := _drop_billing(system):
        result.append({"role": "system", "content": content_texts(kept, "system", warnings)})
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages[{at}]"
        role = "system" if role == "developer" else role
        if role not in ("user", "assistant", "system"):
            raise Problem(f"role {role!r}; expected user or assistant", param=f"{where}.role")
        if isinstance(content, str) or (content is None and role == "assistant"):
            result.append({"role": role, "content": content or ""})
            continue
        if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
            raise Problem("content is no list of blocks", param=f"{where}.content")
        result += _turn(role, content, f"{where}.content", warnings)
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


def _turn(
    role: str, blocks: list[dict[str, Any]], where: str, warnings: list[str]
) -> list[Message]:
    """Return the messages of one turn.

    A user's results of tools come before everything else. An assistant's results, of tools that ran
    on a server, stay in their places, so that the turn becomes more than one message.
    """
    results: list[Message] = []
    turns: list[Message] = [{"role": role, "content": []}]
    for at, block in enumerate(blocks):
        place, current = f"{where}[{at}]", turns[-1]
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
    filled = [*results, *(turn for turn in turns if turn["content"] or len(turn) > 2)]
    return filled or [{"role": role, "content": ""}]
