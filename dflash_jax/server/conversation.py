"""Validation and normalization of messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.server.content import (
    content_text,
    content_texts,
    result_texts,
    thought_text,
    unwrap,
)
from dflash_jax.server.freeform import PARAMETER
from dflash_jax.server.protocol import Message, Problem, check_entries
from dflash_jax.server.thinking import join_reasoning
from dflash_jax.tool_parsers.tool_schema import call_arguments

MOST_MESSAGES = 8192  # rendering takes time per message, even if messages are short
MOST_ARGUMENTS = 200_000  # values of a call: they are decoded, and encoded by the template
ROLES = ("system", "user", "assistant", "tool")


def check_messages(given: Sequence[Any], param: str = "messages") -> None:
    """Refuse too many messages, or input items.

    Raises:
      Problem: there are more than MOST_MESSAGES.
    """
    if len(given) > MOST_MESSAGES:
        raise Problem(
            400,
            f"{param} has {len(given)} entries; at most {MOST_MESSAGES} are accepted: merge"
            " neighbouring ones, or leave out or summarise the oldest",
            param=param,
        )


def parse_messages(
    messages: Sequence[Mapping[str, Any]], warnings: list[str] | None = None
) -> list[Message]:
    """Return messages normalized for chat templates.

    A content becomes a text or a list of texts, which the tokenizer joins the way the template
    does. `developer` becomes `system`, adjacent system messages are merged, and call arguments are
    decoded.

    Args:
      warnings: parts of the messages that are left out or changed are added here.

    Raises:
      Problem: a message is invalid, or there are none or too many.
    """
    if not messages:
        raise Problem(400, "messages is empty; give at least one", param="messages")
    check_messages(messages)
    warnings = [] if warnings is None else warnings
    result: list[Message] = []
    system: list[Any] = []  # contents of adjacent system messages, merged into the last of `result`
    for at, given in enumerate(messages):
        where = f"messages[{at}]"
        message = _normalized(given)
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise Problem(400, f"role {role!r}; expected {known}", param=f"{where}.role")
        content = message.get("content")
        if role == "assistant":
            _read_turn(message, where, warnings)
        elif role == "tool":
            failed = message.pop("is_error", None) is True
            texts = result_texts(content, f"{where}.content", warnings, failed=failed)
            message["content"] = texts
        else:
            message["content"] = content_texts(content, f"{where}.content", warnings)
        if role != "assistant":
            message.pop("tool_calls", None)
        if message["content"] is None and role != "assistant":
            raise Problem(400, f"a {role} message needs content", param=f"{where}.content")
        if role == "system" and system:
            system.append(message["content"])
            continue
        _join_system(result, system)
        result.append(message)
        system = [message["content"]] if role == "system" else []
    _join_system(result, system)
    return result


def _read_turn(message: Message, where: str, warnings: list[str]) -> None:
    """Normalize an assistant's turn: its text, its reasoning and its calls."""
    content = message.get("content")
    thoughts: list[str] = []
    if isinstance(content, list):
        found = [thought_text(part) for part in content]
        thoughts = [text for text in found if text is not None]
        content = [part for part, text in zip(content, found, strict=True) if text is None]
        content = content or ("" if thoughts else None)
    refusal = message.pop("refusal", None)
    if not content and isinstance(refusal, str):
        content = refusal
    message["content"] = content_text(content, f"{where}.content", warnings)
    thought = message.pop("reasoning", None)  # vLLM's name
    if isinstance(thought, str) and not message.get("reasoning_content"):
        message["reasoning_content"] = thought
    if any(thoughts) and not message.get("reasoning_content"):
        message["reasoning_content"] = join_reasoning(*thoughts)
    message["tool_calls"] = parse_tool_calls(message.get("tool_calls"), where, warnings)
    if not message["tool_calls"]:
        del message["tool_calls"]
        message["content"] = message["content"] or ""


def _normalized(given: Mapping[str, Any]) -> Message:
    """Return the message with deprecated roles and fields replaced by current ones."""
    message = dict(given)
    role = message.get("role")
    if role in ("developer", "function"):
        message["role"] = {"developer": "system", "function": "tool"}[role]
    function = message.pop("function_call", None)
    if role == "assistant" and function is not None and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


def _join_system(messages: list[Message], contents: Sequence[Any]) -> None:
    """Set the last message's content to these contents, separated by blank lines."""
    if len(contents) < 2:
        return
    texts: list[list[str]] = [[]]  # each inner list is joined to one text
    for content in contents:
        first, *rest = [content] if isinstance(content, str) else content
        texts[-1].append(first)
        texts += [[text] for text in rest]
    messages[-1]["content"] = unwrap(["\n\n".join(text) for text in texts])


def parse_tool_calls(
    calls: Any, where: str, warnings: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return an assistant message's tool calls as functions, with decoded arguments.

    Args:
      where: path of the message in the request.
      warnings: arguments that are no JSON object are added here.

    Raises:
      Problem: a call has no function name, or too many arguments.
    """
    if calls is None:
        return []
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = _function_of(call)
        if function is None or not isinstance(name := function.get("name"), str):
            raise Problem(400, "a tool call has no function name", param=f"{where}.tool_calls")
        given = function.get("arguments")
        if isinstance(given, str):
            place, text = f"{where}.tool_calls", given.encode(errors="replace")
            check_entries(text, "the call's JSON", place, most_values=MOST_ARGUMENTS)
        arguments, readable = call_arguments(given)
        if warnings is not None and not readable:
            warnings.append(
                f"the arguments of a past call of {name[:150]!r} are no JSON object; the model sees"
                f" {json.dumps(arguments, ensure_ascii=False):.200}"
            )
        kept = {key: value for key, value in call.items() if key != "custom"}
        function = function | {"arguments": arguments}
        result.append(kept | {"type": "function", "function": function})
    return result


def _function_of(call: Any) -> dict[str, Any] | None:
    """Return the function of a call, and a freeform tool as a function of one string."""
    if not isinstance(call, dict):
        return None
    function, custom = call.get("function"), call.get("custom")
    if not isinstance(function, dict) and isinstance(custom, dict):
        return {"name": custom.get("name"), "arguments": {PARAMETER: custom.get("input") or ""}}
    return function if isinstance(function, dict) else None
