"""Validation and normalization of messages, tools and tool choices."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import Message, Problem, check_entries
from dflash_jax.server.unsupported_fields import text_only
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice, choice_of, is_deep, tools_of

MOST_MESSAGES = 8192  # rendering takes time per message, even if messages are short
MOST_TOOLS = 1024
MOST_ARGUMENTS = 200_000  # values of a call: they are decoded, and encoded by the template
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # recovery starts no call with over 64 characters
TEXT_MEDIA = re.compile(r"text/[\w.+-]+|application/(json|xml|yaml|x-yaml|toml)")
ROLES = ("system", "user", "assistant", "tool")


def parse_tools(
    tools: list[dict[str, Any]] | None, choice: Any, places: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], tuple[Tool, ...], ToolChoice]:
    """Return the tools for the chat template, the tools that calls are checked against, the choice.

    Args:
      tools: function definitions in the chat completions format.
      choice: `tool_choice`, in the same format.
      places: paths of the functions in the request, for errors; `tools[0].function` and so on by
        default.

    Raises:
      Problem: a definition or the choice is invalid.
    """
    given = tools or []
    check_tools(given)
    for at, tool in enumerate(given):
        where = places[at] if places else f"tools[{at}].function"
        inner = tool.get("function")
        name = inner.get("name") if isinstance(inner, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str):
            where = where.removesuffix(".function")
            raise Problem(400, f"{where} is no function with a name", param=where)
        if not NAME.fullmatch(name):
            raise Problem(
                400,
                f"the tool name {name[:150]!r}: expected 1 to 128 letters, digits, '_', '.', '-'",
                param=f"{where}.name",
            )
    declared = tools_of(given)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        declared, choice = _allowed_tools(choice, declared)
    if isinstance(choice, str) and choice not in ("none", "auto", "required", "any"):
        raise Problem(
            400, f"tool_choice is {choice!r}; expected none, auto, required or a function",
            param="tool_choice",
        )  # fmt: skip
    try:
        chosen = choice_of(choice or "auto", declared)
    except RequestError as error:
        raise Problem(400, str(error), param="tool_choice") from None
    if chosen.kind in ("required", "named") and not declared:
        raise Problem(
            400, "tool_choice demands a call, but no tools were given", param="tool_choice"
        )
    if chosen.kind == "none":
        return [], (), chosen
    return given, declared, chosen


def check_tools(given: Sequence[Any] | None) -> None:
    """Refuse too many tools.

    Raises:
      Problem: there are more than MOST_TOOLS.
    """
    if given is not None and len(given) > MOST_TOOLS:
        raise Problem(400, f"{len(given)} tools were given; at most {MOST_TOOLS}", param="tools")


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


def _allowed_tools(
    choice: Mapping[str, Any], declared: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that `allowed_tools` permits to be called, and its mode."""
    body = choice.get("allowed_tools", choice)
    body = body if isinstance(body, Mapping) else {}
    names, mode = {tool.name for tool in tools_of(body.get("tools"))}, body.get("mode", "auto")
    if not names or names - {tool.name for tool in declared} or mode not in ("auto", "required"):
        raise Problem(
            400, "tool_choice allows no declared tool, or has another mode than auto and required",
            param="tool_choice",
        )  # fmt: skip
    return tuple(tool for tool in declared if tool.name in names), mode


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages normalized for chat templates.

    A content becomes a text or a list of texts, which the tokenizer joins the way the template
    does. `developer` becomes `system`, adjacent system messages are merged, and call arguments are
    decoded.

    Raises:
      Problem: a message is invalid, or there are none or too many.
    """
    if not messages:
        raise Problem(400, "messages is empty; give at least one", param="messages")
    check_messages(messages)
    result: list[Message] = []
    system: list[Any] = []  # contents of adjacent system messages, merged into the last of `result`
    for at, given in enumerate(messages):
        where = f"messages[{at}]"
        message = _normalized(given)
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise Problem(400, f"role {role!r}; expected {known}", param=f"{where}.role")
        read = content_text if role == "assistant" else content_texts
        message["content"] = read(message.get("content"), f"{where}.content")
        if role != "assistant":
            message.pop("tool_calls", None)
        if role == "assistant":
            if message["content"] is None and not message.get("tool_calls"):
                message["content"] = ""
            thought = message.pop("reasoning", None)  # vLLM's name
            if isinstance(thought, str) and not message.get("reasoning_content"):
                message["reasoning_content"] = thought
            message["tool_calls"] = parse_tool_calls(message.get("tool_calls"), where)
            if not message["tool_calls"]:
                del message["tool_calls"]
        elif message["content"] is None and role == "tool":
            message["content"] = ""
        elif message["content"] is None:
            raise Problem(400, f"a {role} message needs content", param=f"{where}.content")
        if role == "system" and system:
            system.append(message["content"])
            continue
        _join_system(result, system)
        result.append(message)
        system = [message["content"]] if role == "system" else []
    _join_system(result, system)
    return result


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
    messages[-1]["content"] = _unwrap(["\n\n".join(text) for text in texts])


def _unwrap(texts: list[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else texts


def content_text(content: Any, param: str) -> str | None:
    """Return a content as one text: model output that a client split into parts.

    Raises:
      Problem: as for `content_texts`.
    """
    texts = content_texts(content, param)
    return "".join(texts) if isinstance(texts, list) else texts


def content_texts(content: Any, param: str) -> str | list[str] | None:
    """Return the text of a message's content, or a list if it has more than one text.

    Args:
      param: path of the content in the request.

    Raises:
      Problem: the content is neither text nor a list of parts with text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(400, "content is neither a text nor a list", param=param)
    texts = [part_text(part, f"{param}[{at}]") for at, part in enumerate(content)]
    return _unwrap(texts or [""])


def part_text(part: Any, param: str) -> str:
    """Return the text of a content part.

    Args:
      param: path of the part in the request.

    Raises:
      Problem: the part has no text, such as an image.
    """
    if not isinstance(part, dict):
        kind, text = None, part
    elif (kind := part.get("type")) == "document":
        text = _document_text(part, param)
    elif kind in ("file", "input_file"):
        text = _file_text(part.get("file") if kind == "file" else part)
    elif kind in ("text", "input_text", "output_text", "refusal", None):
        text = part.get("text", part.get("refusal"))
    else:
        text = None
    if not isinstance(text, str):
        raise text_only(f"a content part of type {kind!r}", param)
    return text


def _document_text(part: Mapping[str, Any], param: str) -> str:
    """Return the title, context and text of an Anthropic `document`, one per line."""
    source = part.get("source")
    source = source if isinstance(source, dict) else {}
    match source.get("type"):
        case "text":
            given = source.get("data")
        case "content":
            given = source.get("content")
        case _:
            given = None
    blocks = given if isinstance(given, list) else [given]  # documents do not nest
    texts = [block.get("text") if isinstance(block, dict) else block for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        kind = source.get("type")
        raise text_only(f"a document whose source is of type {kind!r} with more than text", param)
    return _lines(part.get("title"), part.get("context"), *texts)


def _lines(*texts: Any) -> str:
    """Return the non-empty strings, one per line."""
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _file_text(file: Any) -> str | None:
    """Return the name and text of an OpenAI file that is a data URL of text, else None."""
    url = file.get("file_data") if isinstance(file, dict) else None
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    media, *parameters = head.removeprefix("data:").split(";")
    if not (comma and head.startswith("data:") and TEXT_MEDIA.fullmatch(media)):
        return None
    try:
        coded = "base64" in parameters
        data = base64.b64decode(body, validate=True) if coded else unquote_to_bytes(body)
        text = data.decode("utf-8-sig")
    except ValueError:
        return None
    return _lines(file.get("filename"), text)


def parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return an assistant message's tool calls, with arguments decoded if they are JSON objects.

    Args:
      where: path of the message in the request.

    Raises:
      Problem: a call has no function name, or too many arguments.
    """
    if calls is None:
        return []
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Problem(400, "a tool call has no function name", param=f"{where}.tool_calls")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            text = arguments.encode(errors="replace")
            place = f"{where}.tool_calls"
            check_entries(text, "the call's JSON", place, most_values=MOST_ARGUMENTS)
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) and not is_deep(parsed) else arguments
        result.append(call | {"function": function | {"arguments": arguments}})
    return result
