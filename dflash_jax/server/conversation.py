"""Validation and normalization of messages, and the text of their contents.

`param`, `where` and `place` are paths in the request, for errors. What is left out or changed is
added to `warnings`.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from dflash_jax.server.fields import join_reasoning, text_only
from dflash_jax.server.protocol import Message, Problem, check_entries
from dflash_jax.server.tools import PARAMETER
from dflash_jax.tool_parsers.tool_schema import call_arguments

# The text of message contents, whose parts differ between APIs.

TEXT_MEDIA = re.compile(r"text/[\w.+-]+|application/(json|xml|yaml|x-yaml|toml)")
MEDIA = re.compile(r"(.*_)?(image|audio|video|file|screenshot)(_url|_file)?")
TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal", None)
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
TOOL_NAMES = ("tool_reference", "tool_addition", "tool_removal")
# Fields with text, in the order of reading, of results of tools that ran elsewhere.
RESULT_FIELDS = (
    "title", "filename", "url", "source", "tool_name", "name", "text", "data", "logs", "stdout",
    "stderr", "output", "outputs", "results", "content", "tool_references", "tools", "outcome",
    "error", "error_code", "message", "summary",
)  # fmt: skip
EXIT_CODES = ("return_code", "exit_code")
FAILED = "The tool call failed."


def unwrap(texts: list[str]) -> str | list[str]:
    """Return the only text, or the list."""
    return texts[0] if len(texts) == 1 else texts


def content_text(content: Any, param: str, warnings: list[str]) -> str | None:
    """Return a content as one text: model output that a client split into parts."""
    texts = content_texts(content, param, warnings)
    return "".join(texts) if isinstance(texts, list) else texts


def content_texts(content: Any, param: str, warnings: list[str]) -> str | list[str] | None:
    """Return the text of a message's content, or a list if it has more than one text."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Problem("content is neither a text nor a list", param=param)
    texts = [part_text(part, f"{param}[{at}]", warnings) for at, part in enumerate(content)]
    return unwrap([text for text in texts if text is not None] or [""])


def result_texts(
    content: Any, param: str, warnings: list[str], *, failed: bool = False
) -> str | list[str]:
    """Return the text of a tool's result; values that are neither text nor parts become JSON.

    Args:
      failed: the client reports that the call failed.
    """
    parts = content if isinstance(content, list) else [content]
    if content is not None and not all(
        isinstance(part, str) or (isinstance(part, dict) and "type" in part) for part in parts
    ):
        content = json.dumps(content, ensure_ascii=False)
    texts = content_texts(content, param, warnings) or ""
    return with_failure(texts) if failed else texts


def with_failure(texts: str | list[str]) -> str | list[str]:
    """Return a tool's result after a note that the call failed."""
    first, *rest = [texts] if isinstance(texts, str) else texts
    return unwrap([f"{FAILED}\n{first}" if first else FAILED, *rest])


def part_text(part: Any, param: str, warnings: list[str]) -> str | None:
    """Return the text of a content part; None if it has none, which adds a warning."""
    if isinstance(part, str):
        return part
    if part is None:
        part = {}
    if not isinstance(part, dict):
        raise Problem(
            f"a content part is {part!r:.50}; expected an object with a type", param=param
        )
    kind = part.get("type")
    match kind:
        case "document":
            return _document_text(part, param)
        case "file" | "input_file":
            text = _file_text(part.get("file") if kind == "file" else part)
        case "search_result":
            text = _lines(part.get("title"), part.get("source"), text_within(part.get("content")))
        case _ if kind in TOOL_NAMES:
            text = _tool_name(part)
        case _ if kind in THOUGHTS:
            text = None  # of another place than an assistant's turn
        case _:
            text = part.get("text", part.get("refusal"))
            if isinstance(text, dict):  # as in the Assistants API
                text = text.get("value")
    if isinstance(text, str):
        if kind not in TEXTS and kind not in ("file", "input_file", "search_result", *TOOL_NAMES):
            warnings.append(f"only the text of content of type {kind!r:.99} was read")
        return text
    if is_medium(part):
        raise text_only(f"a content part of type {kind!r:.99}", param)
    warnings.append(f"content of type {kind!r:.99} without a text was left out")
    return None


def is_medium(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an image, sound, video or binary file."""
    kind = part.get("type")
    names = [kind] if isinstance(kind, str) else list(part)
    return any(MEDIA.fullmatch(name) for name in names)


def thought_text(part: Any) -> str | None:
    """Return the text of a part that is reasoning, empty if it is encrypted; None for others."""
    if not isinstance(part, dict) or part.get("type") not in THOUGHTS:
        return None
    given = next(
        (part[key] for key in ("thinking", "text", "reasoning", "summary") if part.get(key)), ""
    )
    return text_within(given)


def text_within(value: Any) -> str:
    """Return the texts of a result whose form is not known, one per line; names of media.

    Ids and encrypted texts are left out.
    """
    return "\n".join(_texts_within(value))


def _texts_within(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, Sequence):
        return [text for inner in value for text in _texts_within(inner)]
    if not isinstance(value, Mapping):
        return []
    if is_medium(value) and not isinstance(value.get("text"), str):
        return [f"[{value.get('type')}]"]
    if value.get("type") in ("base64", "file"):  # the source of a document
        return [f"[{value.get('media_type') or 'file'}]"]
    texts = [text for field in RESULT_FIELDS for text in _texts_within(value.get(field))]
    codes = (value.get(name) for name in EXIT_CODES)
    return texts + [f"exit code {code}" for code in codes if isinstance(code, int) and code]


def _tool_name(part: Mapping[str, Any]) -> str | None:
    """Return the name of a tool that a part adds, removes or refers to, and what it does."""
    inner = part.get("tool")
    inner = inner if isinstance(inner, Mapping) else part
    name = inner.get("tool_name", inner.get("name"))
    return f"{part['type'].replace('_', ' ')}: {name}" if isinstance(name, str) else None


def _document_text(part: Mapping[str, Any], param: str) -> str:
    """Return the title, context and text of an Anthropic `document`, one per line."""
    source = part.get("source")
    source = source if isinstance(source, dict) else {}
    match source.get("type"):
        case "text":
            given = source.get("data")
        case "content":
            given = source.get("content")
        case "base64" if TEXT_MEDIA.fullmatch(str(source.get("media_type"))):
            given = _decoded(str(source.get("data")), coded=True)
        case _:
            given = None
    blocks = given if isinstance(given, list) else [given]  # documents do not nest
    texts = [_block_text(block) for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        kind = source.get("type")
        raise text_only(f"a document whose source is of type {kind!r} with more than text", param)
    return _lines(part.get("title"), part.get("context"), *texts)


def _block_text(block: Any) -> Any:
    """Return the text of a document's block; anything else but a text for media."""
    if not isinstance(block, dict):
        return block
    text = block.get("text")
    return "" if text is None and block.get("type") == "text" else text


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _file_text(file: Any) -> str | None:
    """Return the name and text of an OpenAI file that is a data URL of text, else None."""
    url = file.get("file_data") if isinstance(file, dict) else None
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    media, *parameters = head.removeprefix("data:").split(";")
    if not (comma and head.startswith("data:") and TEXT_MEDIA.fullmatch(media)):
        return None
    text = _decoded(body, coded="base64" in parameters)
    return None if text is None else _lines(file.get("filename"), text)


def _decoded(body: str, *, coded: bool) -> str | None:
    """Return the text of a data URL's body; None if it is no text."""
    try:
        data = base64.b64decode(body, validate=True) if coded else unquote_to_bytes(body)
        return data.decode("utf-8-sig")
    except ValueError:
        return None


MOST_MESSAGES = 8192  # rendering takes time per message, even if messages are short
MOST_ARGUMENTS = 200_000  # values of a call: they are decoded, and encoded by the template
ROLES = ("system", "user", "assistant", "tool")


def check_messages(given: Sequence[Any], param: str = "messages") -> None:
    """Refuse too many messages, or input items."""
    if len(given) > MOST_MESSAGES:
        raise Problem(
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
    """
    if not messages:
        raise Problem("messages is empty; give at least one", param="messages")
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
            raise Problem(f"role {role!r}; expected {known}", param=f"{where}.role")
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
            raise Problem(f"a {role} message needs content", param=f"{where}.content")
        if role == "system" and system:
            system.append(message["content"])
            continue
        _join_system(result, system)
        result.append(message)
        system = [message["content"]] if role == "system" else []
    _join_system(result, system)
    return result


def _read_turn(message: Message, where: str, warnings: list[str]) -> None:
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
    """Return an assistant message's tool calls as functions, with decoded arguments."""
    if calls is None:
        return []
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = _function_of(call)
        if function is None or not isinstance(name := function.get("name"), str):
            raise Problem("a tool call has no function name", param=f"{where}.tool_calls")
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
