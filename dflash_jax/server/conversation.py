"""Validation and normalization of messages.

`param`, `where` and `place` are paths in the request, for errors. What is left out or changed is
added to `warnings`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.server.contents import (
    content_text,
    content_texts,
    result_texts,
    thought_text,
    unwrap,
)
from dflash_jax.server.freeform import PARAMETER
from dflash_jax.server.protocol import Message, Problem, check_entries
from dflash_jax.server.reasoning import join_reasoning
from dflash_jax.tool_parsers.tool_schema import call_arguments

MOST_MESSAGES = 8192  # rendering takes time per message, even if messages are short
MOST_ARGUMENTS = 200_000  # values of a call: they are decoded, and encoded by the template
ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages: Sequence[Any], param: str = "messages") -> None:
    """Refuse too many messages, or input items.

    Raises:
      Problem: 400, there are more than `MOST_MESSAGES`.
    """
    if len(messages) > MOST_MESSAGES:
        raise Problem(
            f"{param} has {len(messages)} entries; at most {MOST_MESSAGES} are accepted: merge"
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

    Raises:
      Problem: 400, a message has another form, or holds more than text.
    """
    if not messages:
        raise Problem("messages is empty; give at least one", param="messages")
    check_messages(messages)
    warnings = [] if warnings is None else warnings
    parsed: list[Message] = []
    system: list[Any] = []  # contents of adjacent system messages, the last ones of `parsed`
    for at, message in enumerate(messages):
        message = _parse_message(message, f"messages[{at}]", warnings)
        if message["role"] == "system" and system:
            system.append(message["content"])
            continue
        _join_system(parsed, system)
        parsed.append(message)
        system = [message["content"]] if message["role"] == "system" else []
    _join_system(parsed, system)
    return parsed


def _parse_message(message: Mapping[str, Any], where: str, warnings: list[str]) -> Message:
    parsed = _with_current_names(message)
    role = parsed.get("role")
    content = parsed.get("content")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise Problem(f"role {role!r}; expected {known}", param=f"{where}.role")
    if role == "assistant":
        _read_turn(parsed, where, warnings)
        return parsed
    if role == "tool":
        failed = parsed.pop("is_error", None) is True
        texts = result_texts(content, f"{where}.content", warnings, failed=failed)
    else:
        texts = content_texts(content, f"{where}.content", warnings)
    parsed["content"] = texts
    parsed.pop("tool_calls", None)
    if texts is None:
        raise Problem(f"a {role} message needs content", param=f"{where}.content")
    return parsed


def _read_turn(message: Message, where: str, warnings: list[str]) -> None:
    """Parse content, reasoning and tool calls of an assistant's message in place."""
    content = message.get("content")
    thoughts: list[str] = []
    if isinstance(content, list):
        parts = []
        for part in content:
            thought = thought_text(part)
            if thought is None:
                parts.append(part)
            else:
                thoughts.append(thought)
        content = parts or ("" if thoughts else None)
    refusal = message.pop("refusal", None)
    if not content and isinstance(refusal, str):
        content = refusal
    message["content"] = content_text(content, f"{where}.content", warnings)
    reasoning = message.pop("reasoning", None)  # vLLM's name
    if isinstance(reasoning, str) and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if any(thoughts) and not message.get("reasoning_content"):
        message["reasoning_content"] = join_reasoning(*thoughts)
    message["tool_calls"] = parse_tool_calls(message.get("tool_calls"), where, warnings)
    if not message["tool_calls"]:
        del message["tool_calls"]
        message["content"] = message["content"] or ""


def _with_current_names(message: Mapping[str, Any]) -> Message:
    """Return a message with current roles and fields instead of deprecated ones."""
    current = dict(message)
    role = current.get("role")
    if role == "developer":
        current["role"] = "system"
    elif role == "function":
        current["role"] = "tool"
    function = current.pop("function_call", None)
    if role == "assistant" and function is not None and not current.get("tool_calls"):
        current["tool_calls"] = [{"type": "function", "function": function}]
    return current


def _join_system(messages: list[Message], contents: Sequence[Any]) -> None:
    """Set the last message's content to these contents, separated by blank lines."""
    if len(contents) < 2:
        return
    paragraphs: list[list[str]] = [[]]  # paragraphs of each text
    for content in contents:
        first, *others = [content] if isinstance(content, str) else content
        paragraphs[-1].append(first)  # it continues the last text of the content before
        paragraphs += [[text] for text in others]
    messages[-1]["content"] = unwrap(["\n\n".join(text) for text in paragraphs])


def parse_tool_calls(
    calls: Any, where: str, warnings: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return an assistant message's tool calls as functions, with decoded arguments.

    Raises:
      Problem: 400, a call has no function, or too large arguments.
    """
    if calls is None:
        return []
    if not isinstance(calls, list):
        calls = [calls]
    parsed = []
    for call in calls:
        function = _function_of(call)
        if function is None or not isinstance(name := function.get("name"), str):
            raise Problem("a tool call has no function name", param=f"{where}.tool_calls")
        text = function.get("arguments")
        if isinstance(text, str):
            check_entries(
                text.encode(errors="replace"),
                "the call's JSON",
                f"{where}.tool_calls",
                most_values=MOST_ARGUMENTS,
            )
        arguments, readable = call_arguments(text)
        if warnings is not None and not readable:
            warnings.append(
                f"the arguments of a past call of {name[:150]!r} are no JSON object; the model sees"
                f" {json.dumps(arguments, ensure_ascii=False):.200}"
            )
        others = {key: value for key, value in call.items() if key != "custom"}
        function = function | {"arguments": arguments}
        parsed.append(others | {"type": "function", "function": function})
    return parsed


def _function_of(call: Any) -> dict[str, Any] | None:
    """Return the function of a call, and a freeform tool as a function of one string."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    custom = call.get("custom")
    if not isinstance(function, dict) and isinstance(custom, dict):
        return {"name": custom.get("name"), "arguments": {PARAMETER: custom.get("input") or ""}}
    return function if isinstance(function, dict) else None
